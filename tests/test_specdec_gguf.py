"""llama.cpp's own speculation over two GGUF files."""

from contextlib import ExitStack

import pytest
import torch
import transformers

pytest.importorskip("xllamacpp")

from quantkit.evaluation.sampling import Sampling  # noqa: E402
from quantkit.models.files.open import open_checkpoint  # noqa: E402
from quantkit.serving.engines import llamacpp  # noqa: E402
from quantkit.serving.specdec import llamacpp as gguf  # noqa: E402
from quantkit.serving.specdec import transformers as assisted  # noqa: E402
from quantkit.serving.specdec.settings import Settings  # noqa: E402

QUICK = ["--prompts", "2", "--prompt-tokens", "8", "--tokens", "12", "--repeats", "1", "--k", "1,3"]


@pytest.fixture
def files(tiny_model, quantkit, tmp_path):
    """A target and a copy that is like it in every bit."""
    folder = tiny_model("llama", tokenizer=True)
    for name in ("target.gguf", "twin.gguf"):
        done = quantkit(
            "gguf", folder, "-t", "F32", "--solver", "rtn", "--imatrix", "none", "-o", tmp_path / name, "-q"
        )
        assert done.code == 0, done.err
    return tmp_path / "target.gguf", tmp_path / "twin.gguf"


def test_a_twin_drafts_what_the_target_would_write(make, files):
    found = make("specdec", *files, "prompt-lookup", *QUICK)
    twin, lookup = found["drafts"]
    assert found["settings"]["dtype"] == "as stored" and twin["engine"].startswith("llama.cpp")
    for made in (twin, lookup):
        proof = made["proof"]
        assert (proof["texts"], proof["equal"], proof["partings"]) == (4, 4, [])
    for row in twin["swept"]:
        assert row["alpha"] == pytest.approx(1, abs=1e-6)
        assert row["tokens_per_step"] == pytest.approx(11 / -(-11 // (row["k"] + 1)))
        assert row["histogram"] is None
    assert twin["cost_by_bytes"] == 1 and twin["cost"] > 0
    assert twin["draft_memory"] == twin["target_memory"]


def test_only_the_pair_in_use_is_loaded(make, files, monkeypatch):
    """At most one server with a draft, or the target and the draft alone; every k once a repeat."""
    live, held = [], []

    class Counted(llamacpp.Session):
        def __init__(self, settings):
            super().__init__(settings)
            drafts = bool(settings.speculative.draft.mparams.path)
            live.append(self)
            held.append((len(live), drafts))

        def __exit__(self, *error):
            live.remove(self)
            super().__exit__(*error)

    monkeypatch.setattr(gguf, "Session", Counted)
    make("specdec", *files, *QUICK)
    once = [(1, False), (2, False), (1, True), (1, True)]
    assert held[: 2 * len(once)] == once * 2  # the first time to warm up
    assert {number for number, drafts in held if drafts} == {1} and max(held)[0] == 2
    assert live == []


def test_transformers_runs_the_same_files(make, files):
    found = make("specdec", *files, *QUICK, "--engine", "transformers")["drafts"][0]
    assert found["engine"].startswith("transformers")
    assert all(row["alpha"] == 1 for row in found["swept"]) and found["proof"]["alike"]


def test_where_texts_part_the_logits_are_the_targets(files, tiny_model, quantkit, tmp_path, monkeypatch):
    """Another model in the place of the target with a draft: its tokens, in transformers' logits."""
    other = tiny_model("llama", tokenizer=True, name="other", seed=5)
    assert quantkit("gguf", other, "-t", "F32", "--solver", "rtn", "-o", tmp_path / "o.gguf", "-q").code == 0
    monkeypatch.setattr(gguf, "LIKELIEST", 512)  # all of them
    prompt, settings = list(range(40, 60)), Settings(tokens=6)
    with ExitStack() as stack:
        sessions = {
            k: stack.enter_context(llamacpp.Session(llamacpp.parameters(path, 64, threads=1)))
            for k, path in ((0, files[0]), (3, tmp_path / "o.gguf"))
        }
        target = open_checkpoint(str(files[0]))
        made = gguf.Speculation(target, torch.tensor([prompt]), settings, torch.device("cpu"))
        monkeypatch.setattr(made, "_servers", lambda k: [sessions[k]])
        own, drafted = made.run(0, 0, 0), made.run(0, 3, 0)
        assert own.text != drafted.text
        assert made.part(0, 3, own, own) is None
        found = made.part(0, 3, own, drafted)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    ids = assisted.generate(model, torch.tensor([prompt]), Sampling(6), []).ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids[: found.index]])).logits[0, -1]
    assert found.expected == ids[found.index] == logits.argmax() != found.token
    assert found.margin == pytest.approx((logits[found.expected] - logits[found.token]).item(), abs=0.02)
    assert not found.tie and found.noise < 0.05


def test_sampled_text_is_measured_and_not_proven(quantkit, files):
    done = quantkit("specdec", *files, *QUICK, "--temperature", "1", "-q")
    assert done.code == 0, done.err
    assert "proof: none; llama.cpp does not tell the distributions" in done.out


def test_a_folder_and_a_file(make, files, tmp_path):
    """Which transformers runs, as every layout."""
    found = make("specdec", tmp_path / "llama", files[1], *QUICK)["drafts"][0]
    assert found["engine"].startswith("transformers")
    assert all(row["alpha"] == 1 for row in found["swept"])
