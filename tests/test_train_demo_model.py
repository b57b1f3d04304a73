"""scripts/train_demo_model.py, run as a user runs it, on text made here."""

import importlib.util
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_demo_model.py"
VOCAB_SIZE = 300
SHAPE = (
    "--hidden-size 32 --intermediate-size 64 --layers 2 --heads 4 --kv-heads 2 --context 128 "
    f"--vocab-size {VOCAB_SIZE} --seqlen 64 --batch-size 8 --held-out 0.02 --device cpu"
).split()


def start(*arguments: object) -> subprocess.Popen[str]:
    """The script as a process; one thread each, so that several can share the machine."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


def finish(process: subprocess.Popen[str]) -> dict[str, float]:
    """What a run that must succeed reports: stdout is one line of JSON."""
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "tokens/s" in errors and "ETA" in errors
    assert output.count("\n") == 1
    return json.loads(output)


def make_text(size: int) -> str:
    """About `size` characters: NUL-parted documents of invented words, some far more frequent."""
    rng = random.Random(0)
    syllables = [c + v for c in "bdfgklmnprst" for v in "aeiou"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(400)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    sentences, length = [], 0
    while length < size:
        sentence = " ".join(rng.choices(words, weights, k=rng.randint(4, 12))).capitalize()
        sentences.append(sentence + rng.choice([".\n", ". ", "? ", ".\0"]))
        length += len(sentences[-1])
    return "".join(sentences)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module, to test its parts."""
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files, 300 kB together."""
    folder = tmp_path_factory.mktemp("text")
    whole = make_text(300_000)
    first, second = folder / "first.txt", folder / "second.txt"
    first.write_text(whole[:150_000], encoding="utf-8")
    second.write_text(whole[150_000:], encoding="utf-8")
    return [first, second]


def held_out_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: list[Path]) -> float:
    """Nats per token on the last 2 % of the text, one window of 64 targets after the other."""
    documents = [part.decode() for path in text for part in path.read_bytes().split(b"\0") if part]
    stream = [i for document in documents for i in [0, *tokenizer.encode(document)]]
    tail = torch.tensor(stream[round(len(stream) * 0.98) :])
    losses = []
    for at in range(0, len(tail) - 64, 64):
        logits = model(input_ids=tail[None, at : at + 64]).logits[0].detach()
        chosen = logits.log_softmax(-1)[range(64), tail[at + 1 : at + 65]]
        losses.append(-chosen.mean().item())
    return sum(losses) / len(losses)


@pytest.mark.nightly
def test_trains_a_model_that_loads_the_same_for_the_same_seed(text: list[Path], tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    runs = [start(*text, "-o", out, "--steps", 80, *SHAPE) for out in (first, second)]
    report, again = map(finish, runs)
    # Its tokenizer is reused, so the losses before and after are per the same tokens.
    untrained = finish(start(*text, "-o", tmp_path / "third", "--steps", 1, "--tokenizer", first, *SHAPE))

    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    assert report | {"seconds": 0} == again | {"seconds": 0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second", "third"]

    assert report["held_out_loss"] < math.log(VOCAB_SIZE) - 1.5
    assert report["held_out_loss"] < untrained["held_out_loss"] - 1
    assert report["held_out_perplexity"] == pytest.approx(math.exp(report["held_out_loss"]))
    assert (report["steps"], report["tokens"]) == (80, 80 * 8 * 64)

    model = AutoModelForCausalLM.from_pretrained(first)
    tokenizer = AutoTokenizer.from_pretrained(first)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.num_parameters() == report["parameters"]
    assert len(tokenizer) == model.config.vocab_size == VOCAB_SIZE
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == model.config.eos_token_id == 0
    assert tokenizer.decode(tokenizer.encode("Ba, 한글\n\n  x")) == "Ba, 한글\n\n  x"

    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    assert held_out_loss(model, tokenizer, text) == pytest.approx(report["held_out_loss"], abs=1e-4)


def test_rate_warms_up_stays_and_falls_over_the_second_half(script: ModuleType):
    rate = script.schedule(1000)
    assert [rate(step) for step in (0, 49, 99, 500)] == [0.01, 0.5, 1.0, 1.0]
    assert rate(750) == pytest.approx(0.5)
    assert 0 < rate(999) < 0.01
    assert max(map(script.schedule(7), range(7))) == script.schedule(1)(0) == 1.0


def test_long_documents_have_the_tokens_of_the_whole(script: ModuleType):
    document = make_text(100_000).replace("\0", "\n\n  ")
    tokenizer = script.train_tokenizer([document], VOCAB_SIZE)
    assert len(script.PIECE.findall(document)) > 2
    assert script.tokenize(tokenizer, [document]).tolist() == [0, *tokenizer.encode(document)]


def test_user_errors_are_one_line_and_exit_code_2(
    script: ModuleType, text: list[Path], tmp_path: Path, monkeypatch, capsys
):
    def refused(*arguments: object) -> str:
        """The one line on stderr of a run that must be refused."""
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        code = script.main()
        output, errors = capsys.readouterr()
        assert (code, output, errors.count("\n")) == (2, "", 1), errors
        return errors

    existing, short, out = tmp_path / "existing", tmp_path / "short.txt", tmp_path / "out"
    existing.mkdir()
    short.write_text("Too little to train on.")
    assert f"{existing} exists" in refused(*text, "-o", existing, *SHAPE)
    assert list(existing.iterdir()) == []
    assert "missing.txt" in refused(tmp_path / "missing.txt", "-o", out, *SHAPE)
    assert "too little text" in refused(short, "-o", out, *SHAPE)
    assert not out.exists()
