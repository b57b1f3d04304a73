"""`quantkit specdec`: what it prints and records, and what it refuses."""

import hashlib
import json
import re

import families
import jobs
import pytest

from quantkit.models.files.open import open_checkpoint
from quantkit.options import CalibrationOptions
from quantkit.serving.specdec import measure, show
from quantkit.serving.specdec import transformers as assisted
from quantkit.serving.specdec.acceptance_rate import DraftStep
from quantkit.serving.specdec.transformers import DraftedText
from quantkit.text import calibration

QUICK = ["--prompts", "2", "--prompt-tokens", "8", "--tokens", "8", "--repeats", "2", "--k", "3,1"]


@pytest.fixture
def target(tiny_model):
    return tiny_model("llama", tokenizer=True, name="target")


@pytest.fixture
def draft(target, tmp_path):
    jobs.quantize("nf4", target, tmp_path / "draft")
    return tmp_path / "draft"


def test_the_record_of_two_drafts(make, target, draft):
    found = make("specdec", target, draft, "prompt-lookup", *QUICK, "--seed", "3")
    assert found["schema"] == "quantkit.specdec/2"
    assert found["settings"]["ks"] == [1, 3]
    assert found["settings"] | {"prompts": 2, "prompt_tokens": 8, "tokens": 8, "seed": 3} == found["settings"]
    assert [row["draft"] for row in found["drafts"]] == [str(draft), "prompt-lookup"]
    model, lookup = found["drafts"]
    for row in (*model["swept"], *lookup["swept"]):
        assert row["expected"] == pytest.approx(
            row["expected_tokens"] / (row["drafted_per_step"] * row["cost"] + 1)
        )
    for row in model["swept"]:
        assert len(row["histogram"]) == row["k"] + 1
        assert 1 <= row["tokens_per_step"] <= row["k"] + 1
        assert 0 <= row["alpha"] <= 1 and row["judged"] > 0
    for made in (model, lookup):
        proof = made["proof"]
        assert (proof["alike"], proof["partings"]) == (True, [])
        assert (proof["texts"], proof["equal"], proof["tokens"]) == (4, 4, 32)
    # 512 x 64 twice, three blocks; 2 (k, v) * 3 layers * 2 heads * 16 * 16 tokens, all in float32
    assert model["target_memory"]["kv"] == 2 * 3 * 2 * 16 * 16 * 4
    assert lookup["draft_memory"] is None
    assert model["cost_by_bytes"] == model["draft_memory"]["stored"] / model["target_memory"]["stored"] < 1


@pytest.mark.nightly
def test_gguf_files_are_decoded(make, quantkit, target, tmp_path):
    files = [tmp_path / f"{kind}.gguf" for kind in ("F32", "Q8_0")]
    for path in files:
        done = quantkit("gguf", target, "-t", path.stem, "--solver", "rtn", "--imatrix", "none", "-o", path)
        assert done.code == 0, done.err
    twin, smaller = make("specdec", files[0], *files, *QUICK)["drafts"]
    assert all(row["alpha"] == 1 for row in twin["swept"])
    assert smaller["draft_memory"]["note"] == "transformers decodes GGUF files"
    assert [made["proof"]["equal"] for made in (twin, smaller)] == [4, 4]


def test_sampled_text_is_measured_and_not_proven(make, quantkit, target, draft):
    found = make("specdec", target, draft, *QUICK, "--temperature", "1")
    assert found["drafts"][0]["proof"] is None and 0 < found["drafts"][0]["alpha"] <= 1
    done = quantkit("specdec", target, draft, *QUICK, "--temperature", "1", "-q")
    assert done.code == 0 and "proof: none" in done.out


def test_what_is_printed_begins_with_the_verdict(quantkit, target):
    done = quantkit("specdec", target, target, "prompt-lookup", *QUICK)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    for line, name in zip(lines, (str(target), "prompt-lookup"), strict=False):
        assert re.match(
            rf"{name}: drafting (slows this target down|pays|may pay), \d+\.\d\dx at best \(k = [13]\)", line
        )
    assert "greedy text equals the target's own in 4 of 4 texts (32 tokens one by one)" in done.out


def measured(net: float) -> dict:
    spread = {"median": net, "low": net - 0.1, "high": net + 0.1}
    return {"draft": "draft", "swept": [{"k": 2, "net": spread}], "measured": {"k": 2, "speedup": net}}


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (0.61, "draft: drafting slows this target down, 0.61x at best (k = 2)"),
        (1.34, "draft: drafting pays, 1.34x at best (k = 2)"),
        (1.04, "draft: drafting may pay, 1.04x at best (k = 2), but 0.94x to 1.14x by repeat"),
    ],
)
def test_the_verdict(net, said):
    assert show.verdict(measured(net)) == said


def test_text_that_is_not_the_targets_is_an_error_with_a_record(quantkit, target, monkeypatch):
    """As if the rule that accepts were broken: a token of a drafted text is another."""
    whole = assisted.generate

    def broken(model, prompt, how, ends, k=0, guess=None):
        made = whole(model, prompt, how, ends, k, guess)
        if k == 3:
            made.ids[4] = (made.ids[4] + 1) % 512
        return made

    monkeypatch.setattr(assisted, "generate", broken)
    asked = ["specdec", target, "prompt-lookup", *QUICK, "-q"]
    done = quantkit(*asked, "--json")
    assert done.code == 6
    record = json.loads(done.out)
    assert "differs from text of the target alone" in record["error"]["message"]
    proof = record["drafts"][0]["proof"]
    assert (proof["equal"], proof["alike"], len(proof["partings"])) == (2, False, 2)
    assert {(row["k"], row["index"]) for row in proof["partings"]} == {(3, 4)}
    done = quantkit(*asked)
    assert done.code == 6 and "2 DIFFER, 0 part at a tie" in done.out


def test_a_sweep_is_summed_up_from_what_runs_say():
    """Two repeats of one text, by hand: 8 tokens in 4 passes, each pass but the first one drafting 2."""
    steps = [DraftStep(2, 1, 2), DraftStep(2, 2, 3), DraftStep(2, 0, 1), DraftStep(1, 1, 2)]

    def run(scale: float) -> DraftedText:
        return DraftedText(list(range(8)), steps, 9 * scale, 8 * scale, 2 * scale, 6 * scale)

    def plain(scale: float) -> DraftedText:
        steps = [DraftStep(0, 0, 1)] * 8
        return DraftedText(list(range(8)), steps, 8.0 * scale, 7 * scale, 0, 7 * scale)

    found = measure.sweep(2, [[run(1)], [run(2)]], [[plain(1)], [plain(1)]])
    assert found["tokens_per_step"] == 2 and found["drafted_per_step"] == 7 / 4
    assert (found["alpha"], found["judged"]) == (4 / 6, 12)  # two refused
    assert found["histogram"] == [2, 4, 2]
    a = 4 / 6
    assert found["expected_tokens"] == pytest.approx((3 * (1 + a + a * a) + 1 + a) / 4)
    assert found["cost"] == pytest.approx((2 + 4) / (5 + 5))  # after the first pass; a step alone: a second
    assert found["check"] == pytest.approx((6 + 12) / 6)
    assert found["decode"]["median"] == pytest.approx((6 / 8 + 6 / 16) / 2)
    assert (found["net"]["high"], found["net"]["low"]) == pytest.approx((8 / 9, 4 / 9))


def test_the_histogram_leaves_out_steps_with_nothing_to_check():
    steps = [DraftStep(0, 0, 1), DraftStep(2, 0, 1), DraftStep(2, 2, 3), DraftStep(1, 1, 2)]
    run = DraftedText(list(range(7)), steps, 9.0, 8.0, drafting=1.0, checking=1.0)
    assert measure.sweep(2, [[run]], [[run]])["histogram"] == [1, 1, 1]


def test_prompts_are_cut_from_a_text(make, target, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(families.sentences(60)))
    found = make("specdec", target, "prompt-lookup", *QUICK, "--prompt-text", text)
    assert found["settings"]["text"] == "text.txt"
    options = CalibrationOptions(samples=2, seqlen=8, calibration=str(text))
    wanted = calibration.load(open_checkpoint(str(target)), options).tokens
    digest = hashlib.sha256(wanted.numpy().tobytes()).hexdigest()
    assert found["settings"]["prompts_sha256"] == digest


def test_another_vocabulary_is_refused_and_named(refuse, target, tiny_model):
    other = families.save_tokenizer(tiny_model("llama", name="other"), seed=7)
    error, hint = refuse(4, "specdec", target, other, *QUICK)
    assert f"{other} and {target} have different tokenizers: " in error and "lacks '" in error
    assert "prompt-lookup" in hint


def test_a_wider_embedding_is_refused(refuse, target, tiny_model):
    other = tiny_model("llama", tokenizer=True, name="other", vocab_size=520)
    error, _ = refuse(4, "specdec", target, other, *QUICK)
    assert f"{target} predicts 512 tokens, {other} 520" in error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--k", "0"], "--k 0 is invalid"),
        (["--k", "1,x"], "is not a list of numbers"),
        (["--k", ""], "is not a list of numbers"),
        (["--tokens", "1"], "--tokens 1 is invalid"),
        (["--repeats", "0"], "--repeats 0 is invalid"),
        (["--temperature", "-1"], "--temperature -1 is invalid"),
        (["--prompt-tokens", "250"], "was made for 256 tokens; prompt and new tokens make 258"),
    ],
)
def test_questions_that_make_no_sense(refuse, target, options, said):
    error, _ = refuse(2, "specdec", target, "prompt-lookup", *QUICK, *options)
    assert said in error


def test_texts_that_do_not_do(refuse, target, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name, code, said in (
        ("short", 2, "need"),
        ("latin", 2, "is not UTF-8"),
        ("none", 3, "cannot be read"),
    ):
        error, _ = refuse(code, "specdec", target, "prompt-lookup", *QUICK, "--prompt-text", f"{name}.txt")
        assert said in error


def test_what_is_no_model(refuse, target, tmp_path):
    (tmp_path / "empty").mkdir()
    refuse(3, "specdec", tmp_path / "empty", target)


def test_a_state_that_cannot_be_taken_back_is_refused(refuse, tiny_model):
    mamba = tiny_model("mamba2", tokenizer=True)
    error, _ = refuse(4, "specdec", mamba, "prompt-lookup", *QUICK)
    assert "keeps a recurrent state" in error
