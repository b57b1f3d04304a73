"""llama.cpp's own speculation over two GGUF files."""

import json

import pytest
import torch
import transformers

pytest.importorskip("xllamacpp")

from quantkit.evaluation.sampling import Sampling  # noqa: E402
from quantkit.models.files.open import open_checkpoint  # noqa: E402
from quantkit.serving.engines import llamacpp  # noqa: E402
from quantkit.serving.specdec import llamacpp as gguf  # noqa: E402
from quantkit.serving.specdec import transformers as assisted  # noqa: E402
from quantkit.serving.specdec.acceptance_rate import Step  # noqa: E402
from quantkit.serving.specdec.settings import Settings  # noqa: E402

QUICK = ["--prompts", "2", "--prompt-tokens", "8", "--tokens", "12", "--repeats", "1", "--k", "1,3"]


@pytest.fixture
def files(tiny_model, quantkit, tmp_path):
    """A target and an exact copy."""
    folder = tiny_model("llama", tokenizer=True)
    for name in ("target.gguf", "twin.gguf"):
        done = quantkit(
            "gguf", folder, "-t", "F32", "--solver", "rtn", "--imatrix", "none", "-o", tmp_path / name, "-q"
        )
        assert done.code == 0, done.err
    return tmp_path / "target.gguf", tmp_path / "twin.gguf"


def test_a_twin_drafts_the_text_of_the_target(make, files):
    found = make("specdec", *files, "prompt-lookup", *QUICK)
    twin, lookup = found["drafts"]
    assert found["settings"]["dtype"] == "as stored" and twin["engine"].startswith("llama.cpp")
    for made in (twin, lookup):
        proof = made["proof"]
        assert (proof["texts"], proof["equal"], proof["partings"]) == (4, 4, [])
        assert all(row["check"] > 0 for row in made["swept"])
    for row in twin["swept"]:
        passes = -(-11 // (row["k"] + 1))  # after the first token
        assert row["alpha"] == 1 and row["judged"] == 2 * (11 - passes)
        assert row["tokens_per_step"] == 12 / (1 + passes)
        assert 0 < sum(row["histogram"]) <= 2 * passes and row["cost"] > 0
    assert twin["cost_by_bytes"] == 1 and lookup["cost"] == 0
    assert twin["draft_memory"] == twin["target_memory"]


def test_only_the_servers_of_one_k_are_loaded(make, files, monkeypatch):
    """One server with a draft, or the target and the draft alone; every k once a repeat."""
    live, loaded = [], []

    class Counted(llamacpp.Session):
        def __init__(self, settings):
            super().__init__(settings)
            live.append(self)
            loaded.append((len(live), bool(settings.speculative.draft.mparams.path)))

        def close(self):
            live.remove(self)
            super().close()

    monkeypatch.setattr(gguf, "Session", Counted)
    make("specdec", *files, *QUICK)
    assert loaded == [(1, False), (2, False), (1, True), (1, True)] * 2  # the first time to warm up
    assert live == []


def chunk(text: str, milliseconds: float, *totals: int) -> dict:
    names = zip(gguf.TOTALS, totals, strict=False)
    return {"choices": [{"text": text}], "timings": {"predicted_ms": milliseconds, **dict(names)}}


def test_passes_are_read_from_totals():
    """Two accepted of three; all of three; then a text that ends inside the accepted tokens."""
    rows = [
        ("a", 0, 1),
        *(("b", 1, 1 + n, 3, 2) for n in (1, 2, 3)),
        *(("c", 2, 4 + n, 6, 5) for n in (1, 2, 3, 4)),
    ]
    rows += [("d", 3, 9, 9, 8), ("", 3, 10, 9, 8), ("", 3, 10, 9, 8)]
    texts, steps = gguf.passes([chunk(*row) for row in rows])
    assert "".join(texts) == "abbbccccd" and len(texts) == 10
    assert steps == [Step(0, 0, 1), Step(3, 2, 3), Step(3, 3, 4), Step(3, 2, 2)]


def test_tokens_inside_a_character_are_passes_of_their_own():
    texts, steps = gguf.passes([chunk("é", 1, 2), chunk("è", 3, 4, 4, 0), chunk("", 3, 4, 4, 0)])
    assert texts == ["", "é", "", "è"]
    assert steps == [Step(0, 0, 1), Step(0, 0, 1), Step(2, 0, 1), Step(2, 0, 1)]


def test_where_texts_part_the_logits_are_the_targets(files, tiny_model, quantkit, tmp_path, monkeypatch):
    """Another model in the place of the target with a draft: its tokens, in transformers' logits."""
    other = tiny_model("llama", tokenizer=True, name="other", seed=5)
    assert quantkit("gguf", other, "-t", "F32", "--solver", "rtn", "-o", tmp_path / "o.gguf", "-q").code == 0
    monkeypatch.setattr(gguf, "LIKELIEST", 512)  # all of them
    prompt, settings = list(range(40, 60)), Settings(tokens=6)
    paths = {0: files[0], 3: tmp_path / "o.gguf"}
    sessions = {k: [llamacpp.Session(llamacpp.parameters(paths[k], 64, threads=1))] for k in paths}
    pair = gguf.LlamaCppPair(
        open_checkpoint(str(files[0])), torch.tensor([prompt]), settings, torch.device("cpu")
    )
    pair.load(None)
    monkeypatch.setattr(pair, "_servers", sessions.get)
    own, drafted = pair.run(0, 0, 0), pair.run(0, 3, 0)
    assert own.ids != drafted.ids
    assert pair.part(0, 3, own, own) is None
    found = pair.part(0, 3, own, drafted)
    for (session,) in sessions.values():
        session.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    ids = assisted.generate(model, torch.tensor([prompt]), Sampling(6), []).ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids[: found["index"]]])).logits[0, -1]
    assert found["expected"] == ids[found["index"]] == logits.argmax() != found["token"]
    wanted = (logits[found["expected"]] - logits[found["token"]]).item()
    assert found["margin"] == pytest.approx(wanted, abs=0.02)
    assert not found["tie"] and found["noise"] < 0.05


def test_a_text_of_another_model_is_an_error(quantkit, files, monkeypatch):
    """As if a draft changed the text: its last token is another."""
    whole = gguf.passes

    def broken(chunks):
        texts, steps = whole(chunks)
        return ([*texts[:-1], "other"] if any(step.drafted for step in steps) else texts), steps

    monkeypatch.setattr(gguf, "passes", broken)
    done = quantkit("specdec", *files, *QUICK, "--json", "-q")
    assert done.code == 6
    assert "differs from text of the target alone" in json.loads(done.out)["error"]["message"]


def test_sampled_text_is_measured_and_not_proven(make, files):
    found = make("specdec", *files, *QUICK, "--temperature", "1")["drafts"][0]
    assert found["proof"] is None and all(0 <= row["alpha"] < 1 for row in found["swept"])


def test_transformers_runs_the_same_files(make, refuse, files, tmp_path):
    for options in ([*files, "--engine", "transformers"], [tmp_path / "llama", files[1]]):
        found = make("specdec", *options, *QUICK)["drafts"][0]
        assert found["engine"].startswith("transformers")
        assert all(row["alpha"] == 1 for row in found["swept"])
    error, _ = refuse(4, "specdec", tmp_path / "llama", files[1], "--engine", "llama.cpp")
    assert "llama.cpp runs GGUF files, not" in error
    error, _ = refuse(2, "specdec", *files, "--dtype", "float32")
    assert "--dtype is for transformers" in error
