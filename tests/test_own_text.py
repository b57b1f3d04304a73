"""Text that a model writes by itself: sampled by its own distribution, from the first token, and ended where
the model ends it."""

import json

import pytest
import torch
import transformers

from quantkit import errors
from quantkit.evaluation import own_text
from quantkit.evaluation.own_text import Settings
from quantkit.models.open import open_checkpoint
from quantkit.options import CalibrationOptions
from quantkit.quantize.progress import Progress
from quantkit.text import calibration

CPU = torch.device("cpu")


def written(folder, output, **settings) -> tuple[dict, list[str]]:
    checkpoint = open_checkpoint(str(folder))
    record = own_text.write(checkpoint, Settings(**settings), output, torch.float32, CPU, Progress())
    return record, [json.loads(line)["text"] for line in output.read_text().splitlines()]


def test_tokens_are_drawn_as_the_model_expects_them(tiny_model, tmp_path):
    """How often each first token comes, of 1,024, against its probability behind the token that begins texts:
    at most five deviations away."""
    folder = tiny_model("llama", tokenizer="bos")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        expected = model(torch.tensor([[tokenizer.bos_token_id]])).logits[0, 0].softmax(-1)
    checkpoint = open_checkpoint(str(folder))
    texts = own_text._texts(checkpoint, model, Settings(seqlen=8, batch_size=1024))
    found = torch.zeros_like(expected)
    for _ in range(1024):
        found[next(texts)[0]] += 1
    deviation = (1024 * expected * (1 - expected)).sqrt()
    assert ((found - 1024 * expected).abs() <= 5 * deviation + 1).all() and (found > 0).sum() > 8


def test_a_seed_writes_the_same_and_calibration_reads_it(tiny_model, tmp_path):
    folder = tiny_model("llama", tokenizer="bos")
    settings = {"samples": 4, "seqlen": 24, "batch_size": 3}
    record, texts = written(folder, tmp_path / "a.jsonl", **settings)
    assert record["texts"] == len(texts) and record["tokens"] >= 4 * 24
    assert written(folder, tmp_path / "b.jsonl", **settings)[1] == texts
    assert written(folder, tmp_path / "c.jsonl", seed=1, **settings)[1] != texts
    options = CalibrationOptions(calibration=str(tmp_path / "a.jsonl"), samples=3, seqlen=24)
    assert calibration.load(open_checkpoint(str(folder)), options).tokens.shape == (3, 24)


def test_texts_end_where_the_model_ends_them(tiny_model, tmp_path):
    folder = tiny_model("llama", tokenizer="bos")
    ends = list(range(40, 60))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    checkpoint = open_checkpoint(str(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = own_text._texts(checkpoint, model, Settings(seqlen=64, batch_size=64))
    found = [next(texts) for _ in range(32)]
    assert all(own_text.SHORTEST <= len(ids) and not set(ids) & set(ends) for ids in found)
    assert any(len(ids) < 64 for ids in found)


def test_a_model_that_writes_nothing_is_told_so(tiny_model, tmp_path):
    folder = tiny_model("llama", tokenizer="bos")
    vocabulary = open_checkpoint(str(folder)).text_config.vocab_size
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(vocabulary))}))
    with pytest.raises(errors.QuantkitError, match="ends its texts before they have begun"):
        written(folder, tmp_path / "own.jsonl", samples=1, seqlen=16, batch_size=2)
    assert list(tmp_path.glob("own*")) == []


@pytest.mark.parametrize(
    "settings, said",
    [({"samples": 0}, "--samples 0"), ({"temperature": 0.0}, "--temperature 0"), ({"seqlen": 10**6}, "10")],
)
def test_what_makes_no_sense_is_refused(tiny_model, tmp_path, settings, said):
    with pytest.raises(errors.QuantkitError, match=said):
        written(tiny_model("llama", tokenizer="bos"), tmp_path / "own.jsonl", **settings)


def test_only_texts_are_replaced(tmp_path):
    own, other = tmp_path / "own.jsonl", tmp_path / "notes.py"
    own.write_text('{"text": "a"}\n')
    other.write_text("import os\n")
    own_text.check_output(own, True)
    for path, overwrite, said in [
        (own, False, "exists"),
        (other, True, "holds no texts"),
        (tmp_path, True, "no plain file"),
        (tmp_path / "none" / "a.jsonl", False, "no such folder"),
    ]:
        with pytest.raises(errors.QuantkitError, match=said):
            own_text.check_output(path, overwrite)
