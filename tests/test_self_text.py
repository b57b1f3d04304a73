"""Files of text that a model writes itself, sampled from its own distribution."""

import json

import pytest
import torch
import transformers

from quantkit import errors
from quantkit.evaluation import self_text
from quantkit.evaluation.settings import SampleSettings
from quantkit.models.files.open import open_checkpoint
from quantkit.options import CalibrationOptions
from quantkit.text import calibration

CPU = torch.device("cpu")


def written(folder, output, **settings) -> tuple[dict, list[str]]:
    checkpoint = open_checkpoint(str(folder))
    record = self_text.write(checkpoint, SampleSettings(**settings), output, torch.float32, CPU)
    return record, [json.loads(line)["text"] for line in output.read_text().splitlines()]


def test_a_file_holds_the_sequences_and_calibration_reads_it(tiny_model, tmp_path):
    folder = tiny_model("llama", tokenizer="bos")
    settings = {"samples": 5, "seqlen": 24, "batch_size": 3}
    record, texts = written(folder, tmp_path / "a.jsonl", **settings)
    assert (record["texts"], record["tokens"]) == (6, 6 * 24) == (len(texts), 144)
    checkpoint = open_checkpoint(str(folder))
    more = SampleSettings(**settings | {"samples": 6})
    batches = list(self_text.sequences(checkpoint, more, torch.float32, CPU))
    assert [len(batch) for batch in batches] == [3, 3]
    rows = torch.cat(batches)[:, 1:].tolist()
    assert texts == [checkpoint.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert written(folder, tmp_path / "b.jsonl", **settings, seed=1)[1] != texts
    options = CalibrationOptions(calibration=str(tmp_path / "a.jsonl"), samples=5, seqlen=24)
    loaded = calibration.load(checkpoint, options)
    assert loaded.tokens.shape == (5, 24) and loaded.warning is None


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"samples": 0}, "--samples 0 is invalid"),
        ({"batch_size": 0}, "--batch-size 0 is invalid"),
        ({"seqlen": 10**6}, "was made for [0-9]+ tokens, not --seqlen 1000000"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny_model, tmp_path, settings, said):
    with pytest.raises(errors.QuantkitError, match=said):
        written(tiny_model("llama", tokenizer="bos"), tmp_path / "own.jsonl", **settings)


def test_a_full_disk_leaves_nothing(tiny_model, tmp_path, monkeypatch):
    def full(*arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(errors.QuantkitError, match="cannot be written: No space left"):
        written(tiny_model("llama", tokenizer="bos"), tmp_path / "own.jsonl", samples=1, seqlen=8)
    assert list(tmp_path.glob("own*")) == []


def test_the_next_command_can_be_pasted_and_takes_the_original(tiny_model, quantkit, tmp_path):
    """gptq refuses a model that is quantized already."""
    tiny_model("llama", name="my model", tokenizer=True)
    assert quantkit("nf4", "my model", "-o", "nf4", "-q", "--loss-tokens", 0).code == 0
    asked = ("--samples", 2, "--seqlen", 16, "-q")
    for model, following in (
        ("my model", "'my model' --calibration 'my model-own.jsonl' {} -o 'my model-gptq-own'"),
        ("nf4", "MODEL --calibration nf4-own.jsonl {} -o nf4-gptq-own"),
    ):
        following = following.format("--samples 2 --seqlen 16")
        assert quantkit("sample", model, *asked).out.endswith(f"\nnext: quantkit gptq {following}\n")


def test_only_such_text_is_replaced(tmp_path):
    own, other = tmp_path / "own.jsonl", tmp_path / "notes.py"
    own.write_text('{"text": "a"}\n')
    other.write_text("import os\n")
    self_text.check_output(own, True)
    for path, overwrite, said in [
        (own, False, "exists"),
        (other, True, "was not written by quantkit sample"),
        (tmp_path, True, "is not a plain file"),
        (tmp_path / "new.txt", False, "sample writes JSON lines"),
        (tmp_path / "none" / "a.jsonl", False, "no such folder"),
    ]:
        with pytest.raises(errors.QuantkitError, match=said):
            self_text.check_output(path, overwrite)


def test_the_teacher_writes_what_it_believes(tiny_model):
    """Sampled token by token without a cache from its own distribution, with the same seed."""
    folder = tiny_model("llama", tokenizer="bos")
    settings = SampleSettings(3, 10, 7)
    (made,) = self_text.sequences(open_checkpoint(str(folder)), settings, torch.float32, CPU)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.zeros(3, 1, dtype=torch.long)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        for _ in range(9):
            following = torch.multinomial(torch.softmax(model(ids).logits[:, -1].float(), -1), 1)
            ids = torch.cat([ids, following], 1)
    assert torch.equal(made, ids)
