"""quantkit.evaluate against transformers: whole models, whole logits, one window after another."""

import functools
import hashlib
import json
import math
import shutil
from pathlib import Path

import families
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import log_softmax
from typer.testing import CliRunner

from quantkit import cli, evaluate
from quantkit import windows as windows_of
from quantkit.checkpoint import Checkpoint
from quantkit.errors import NOT_FOUND, UNSUPPORTED, USAGE, QuantkitError
from quantkit.tokenizer_hash import tokenizer_sha256

CPU = torch.device("cpu")
HELDOUT = Path(__file__).parent / "data" / "heldout.txt"


def measure(folders: list, windows: windows_of.Windows, dtype=torch.float32) -> list[evaluate.Result]:
    return evaluate.evaluate([Checkpoint.open(str(folder)) for folder in folders], windows, dtype, CPU)


@functools.cache
def load(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@torch.no_grad()
def log_probs(folder: Path, ids: list[int]) -> torch.Tensor:
    """float64 `[len(ids), vocabulary]`, by transformers alone."""
    return log_softmax(load(folder)(torch.tensor([ids])).logits[0].double(), -1)


def perturbed(source: Path, folder: Path, share: float = 0.1) -> Path:
    """A copy whose matrices have noise of `share` of their own size."""
    shutil.copytree(source, folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        if tensor.ndim == 2:
            tensor += share * tensor.std() * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(families.sentences()))
    return path


def refused(code: int, call, *arguments) -> tuple[str, str]:
    with pytest.raises(QuantkitError) as error:
        call(*arguments)
    assert error.value.exit_code == code
    return error.value.message, error.value.hint


# ---- the numbers


def test_a_trained_model_and_a_worse_copy(demo_model, tmp_path):
    """nll, its standard error, and KL divergence from whole logits in float64."""
    copy = perturbed(demo_model, tmp_path / "copy")
    windows = windows_of.load(Checkpoint.open(str(demo_model)), HELDOUT, 128, None, 400)
    results = measure([demo_model, copy], windows)
    assert windows.ids.shape == (3, 128) and windows.protocol.tokens == 3 * 127
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model)
    ids = tokenizer(HELDOUT.read_text(), add_special_tokens=False)["input_ids"][:384]
    assert windows.ids.flatten().tolist() == ids
    logs = [
        torch.cat([log_probs(folder, ids[start : start + 128])[:-1] for start in (0, 128, 256)])
        for folder in (demo_model, copy)
    ]
    targets = torch.cat([torch.tensor(ids[start + 1 : start + 128]) for start in (0, 128, 256)])
    for result, log in zip(results, logs, strict=True):
        losses = -log[torch.arange(len(targets)), targets]
        metrics = result.metrics.record()
        assert metrics["nll"]["value"] == pytest.approx(losses.mean().item(), abs=1e-4)
        stderr = losses.std(correction=1).item() / math.sqrt(len(losses))
        assert metrics["nll"]["stderr"] == pytest.approx(stderr, abs=1e-4)
        assert metrics["ppl"]["value"] == math.exp(metrics["nll"]["value"])
        assert metrics["ppl"]["stderr"] == metrics["ppl"]["value"] * metrics["nll"]["stderr"]
    kld = (logs[0].exp() * (logs[0] - logs[1])).sum(1).mean().item()
    assert results[0].metrics.kld is None
    assert results[1].metrics.kld == pytest.approx(kld, abs=1e-5) and kld > 0.01
    assert (
        results[0].metrics.nll < results[1].metrics.nll < 5
    )  # trained: an untrained one has log(4096) = 8.3


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(("ctx", "stride"), [(32, None), (32, 32), (32, 31), (32, 16), (32, 5), (17, 2)])
def test_windows_are_a_literal_sliding_window(tiny_model, text, bos, ctx, stride):
    """Every text token in reach is scored once, given all the tokens its window holds before it."""
    folder = tiny_model("llama", tokenizer="bos" if bos else True)
    windows = windows_of.load(Checkpoint.open(str(folder)), text, ctx, stride, 200)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text.read_text(), add_special_tokens=False)["input_ids"][:200]
    body = ctx - bos
    step = min(stride or ctx, body)
    losses, scored, rows = [], [], []
    for start in range(0, len(ids) - body + 1, step):
        rows.append([0] * bos + ids[start : start + body])
        log = log_probs(folder, rows[-1])
        for position in range(1, ctx):
            place = start + position - bos  # of the predicted token in the text
            if place not in scored:
                losses.append(-log[position - 1, rows[-1][position]].item())
                scored.append(place)
    assert windows.ids.tolist() == rows
    assert windows.protocol.tokens == len(scored)
    if step < ctx:  # without overlap or BOS, nothing predicts a window's first token
        assert scored == list(range(not bos, scored[-1] + 1)) and scored[-1] >= len(ids) - step
    nll = measure([folder], windows)[0].metrics.nll
    assert nll == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_long_windows_are_measured_in_chunks(tiny_model, text, monkeypatch):
    """Neither the size of a chunk of logits nor of a batch of windows changes what is measured."""
    folder = tiny_model("llama", tokenizer=True)
    other = perturbed(folder, folder.with_name("other"))
    windows = windows_of.load(Checkpoint.open(str(folder)), text, 64, 48, 400)
    whole = measure([folder, other], windows)
    monkeypatch.setattr(evaluate, "CHUNK_BYTES", 4 * 512 * 7)
    monkeypatch.setattr(evaluate, "BATCH_TOKENS", 3 * 64)
    pieces = measure([folder, other], windows)
    for one, two in zip(whole, pieces, strict=True):
        assert two.metrics.nll == pytest.approx(one.metrics.nll, abs=1e-6)
    assert pieces[1].metrics.kld == pytest.approx(whole[1].metrics.kld, abs=1e-6) and whole[1].metrics.kld > 0


def test_several_models_are_compared_to_the_first(tiny_model, text):
    base = tiny_model("llama", tokenizer=True, dtype="bfloat16")
    near, far = (perturbed(base, base.with_name(f"{share}"), share) for share in (0.1, 0.5))
    shutil.copytree(base, copy := base.with_name("copy"))
    windows = windows_of.load(Checkpoint.open(str(base)), text, 64, None, 300)
    results = measure([base, near, copy, far], windows)
    assert [Path(result.source).name for result in results] == ["llama", "0.1", "copy", "0.5"]
    assert results[0].metrics.kld is None and results[2].metrics.kld == 0
    assert results[2].metrics.nll == results[0].metrics.nll
    assert 0 < results[1].metrics.kld < results[3].metrics.kld
    alone = measure([far], windows)[0].metrics
    assert (alone.nll, alone.kld) == (results[3].metrics.nll, None)
    reverse = measure([far, base], windows)
    assert (
        reverse[1].metrics.nll == results[0].metrics.nll and reverse[1].metrics.kld != results[3].metrics.kld
    )


@pytest.mark.parametrize("options", ["--bits 4", "--bits 3 --no-sym --act-order full --exclude q_proj"])
def test_a_quantized_folder_measures_like_its_dense_decode(tiny_model, text, options):
    base = tiny_model("llama", tokenizer=True)
    packed, dense = base.with_name("packed"), base.with_name("dense")
    small = f"--group-size 32 --samples 2 --seqlen 32 --threads 1 --calibration {text} -o {packed}"
    done = CliRunner().invoke(cli.app, ["gptq", str(base), *small.split(), *options.split()])
    assert done.exit_code == 0, done.exception
    checkpoint = Checkpoint.open(str(packed))
    shutil.copytree(base, dense)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names}
    assert tensors.keys() == Checkpoint.open(str(base)).infos.keys() < set(tensors) | set(checkpoint.infos)
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    windows = windows_of.load(Checkpoint.open(str(base)), text, 64, None, 300)
    of_base, of_packed, of_dense = measure([base, packed, dense], windows)
    assert of_packed.metrics == of_dense.metrics and of_packed.metrics.kld > 0
    assert of_packed.bits_per_weight < 32 == of_dense.bits_per_weight == of_base.bits_per_weight
    assert of_packed.weight_bytes == sum(
        tensor.nbytes for tensor in load_file(packed / "model.safetensors").values()
    )


def test_sixteen_bit_passes_are_the_models_own(tiny_model, text):
    folder = tiny_model("llama", tokenizer=True)
    windows = windows_of.load(Checkpoint.open(str(folder)), text, 64, None, 128)
    half = measure([folder], windows, torch.bfloat16)[0].metrics.nll
    with torch.no_grad():
        logs = log_softmax(load(folder, torch.bfloat16)(windows.ids).logits[:, :-1].float(), -1)
    expected = -logs.gather(2, windows.ids[:, 1:, None]).double().mean().item()
    assert half == pytest.approx(expected, abs=1e-4)
    assert half != measure([folder], windows)[0].metrics.nll


# ---- the record


def test_the_record_has_exactly_this_shape(tiny_model, text):
    base = tiny_model("llama", tokenizer="bos", tie_word_embeddings=True)
    shutil.copytree(base, copy := base.with_name("copy"))
    arguments = f"eval {base} {copy} --text {text} --ctx 32 --stride 16 --limit 100 --json -q".split()
    done = CliRunner().invoke(cli.app, arguments)
    record = json.loads(done.stdout)
    weights = sum(tensor.numel() for tensor in load_file(base / "model.safetensors").values())
    metrics = [row.pop("metrics") for row in record["models"]]
    steps = (100 - 31) // 16
    assert record == {
        "schema": "quantkit.eval/1",
        "data": {
            "text": "text.txt",
            "sha256": hashlib.sha256(text.read_bytes()).hexdigest(),
            "tokens": 31 + 16 * steps,
            "ctx": 32,
            "stride": 16,
            "bos": True,
            "tokenizer": tokenizer_sha256(Checkpoint.open(str(copy)).tokenizer),
            "dtype": "float32",
        },
        "models": [
            {
                "source": str(folder),
                "size": {
                    "disk_bytes": sum(path.stat().st_size for path in folder.iterdir()),
                    "weight_bytes": 4 * weights,
                    "bits_per_weight": 32.0,
                },
            }
            for folder in (base, copy)
        ],
    }
    value = metrics[0]["nll"]["value"]
    assert 5.5 < value < 7.5  # log(512) = 6.2
    stderr = metrics[0]["nll"]["stderr"]
    assert 0 < stderr < 0.2
    assert metrics[0] == {
        "nll": {"value": value, "stderr": stderr},
        "ppl": {"value": math.exp(value), "stderr": math.exp(value) * stderr},
        "kld": {"mean": None},
    }
    assert metrics[1] == metrics[0] | {"kld": {"mean": 0.0}}


def test_the_protocol_follows_the_model_unless_told(tiny_model, text):
    def protocol(folder: Path, *arguments) -> tuple:
        made = windows_of.load(Checkpoint.open(str(folder)), text, *arguments).protocol
        return made.ctx, made.stride, made.bos, made.tokens

    text.write_text("\n".join(families.sentences()) * 3)
    assert protocol(tiny_model("llama", tokenizer=True), None, None, 1000) == (256, 256, False, 3 * 255)
    unlimited = tiny_model("bloom", tokenizer="bos")
    assert protocol(unlimited, None, None, 5000) == (2048, 2048, True, 2 * 2047)
    assert protocol(unlimited, 100, 50, 5000)[:2] == (100, 50)


# ---- what cannot be compared, or measured


def one_more_token(tokenizer: dict) -> None:
    tokenizer["model"]["vocab"]["never"] = 512


def one_merge_less(tokenizer: dict) -> None:
    tokenizer["model"]["merges"].pop()  # the same vocabulary, cut differently


@pytest.mark.parametrize("change", [one_more_token, one_merge_less])
def test_different_tokenizers_are_refused(tiny_model, text, change):
    base, other = (
        tiny_model("llama", tokenizer=True, name=name, vocab_size=576) for name in ("base", "other")
    )
    path = other / "tokenizer.json"
    change(content := json.loads(path.read_text()))
    path.write_text(json.dumps(content))
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (base, other))
    assert (ours(text.read_text()) != theirs(text.read_text())) == (change is one_merge_less)
    windows = windows_of.load(Checkpoint.open(str(base)), text, 32, None, None)
    message, _ = refused(UNSUPPORTED, measure, [base, other], windows)
    assert message == f"{other} and {base} have different tokenizers"


@pytest.mark.parametrize("sizes", [(512, 576), (576, 512)])
def test_different_vocabularies_are_refused(tiny_model, text, sizes):
    folders = [tiny_model("llama", tokenizer=True, name=f"{size}", vocab_size=size) for size in sizes]
    windows = windows_of.load(Checkpoint.open(str(folders[0])), text, 32, None, 200)
    message, _ = refused(UNSUPPORTED, measure, folders, windows)
    assert all(str(folder) in message for folder in folders) and all(str(size) in message for size in sizes)


def test_windows_longer_than_any_models_context_are_refused(tiny_model, text):
    base = tiny_model("gpt2", tokenizer=True)
    short = tiny_model("gpt2", tokenizer=True, name="short", max_position_embeddings=32)
    message, hint = refused(USAGE, windows_of.load, Checkpoint.open(str(short)), text, 33, None, None)
    assert "--ctx 33" in message and "context 32" in message and hint == "use --ctx 32"
    windows = windows_of.load(Checkpoint.open(str(base)), text, 64, None, 200)
    message, hint = refused(USAGE, measure, [base, short], windows)
    assert "--ctx 64" in message and str(short) in message and hint == "use --ctx 32"


@pytest.mark.parametrize(
    ("ctx", "stride", "limit", "words"),
    [
        (1, None, None, "--ctx 1"),
        (32, 33, None, "--stride 33"),
        (32, -1, None, "--stride -1"),
        (32, 0, None, "--stride 0"),
        (0, None, None, "--ctx 0"),
        (32, None, 0, "--limit 0"),
        (32, None, -5, "--limit -5"),
        (32, None, 31, "31 tokens; one window needs 32"),
        (2, None, 2, "1 token"),  # has no standard error
    ],
)
def test_sizes_that_make_no_measurement(tiny_model, text, ctx, stride, limit, words):
    checkpoint = Checkpoint.open(str(tiny_model("llama", tokenizer=True)))
    message, hint = refused(USAGE, windows_of.load, checkpoint, text, ctx, stride, limit)
    assert words in message and hint


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (None, NOT_FOUND, "cannot be read: No such file"),
        (b"", USAGE, "holds 0 tokens; one window needs 256"),
        (b"Short.", USAGE, "one window needs 256"),
        (b"\xff\xfe", USAGE, "not UTF-8"),
    ],
)
def test_texts_that_do_not_serve(tiny_model, tmp_path, content, code, words):
    path = tmp_path / "other.txt"
    if content is not None:
        path.write_bytes(content)
    checkpoint = Checkpoint.open(str(tiny_model("llama", tokenizer=True)))
    message, hint = refused(code, windows_of.load, checkpoint, path, None, None, None)
    assert "other.txt" in message and words in message and hint


def test_an_incomplete_model_is_refused(tiny_model, text):
    base, other = tiny_model("llama", tokenizer=True), tiny_model("llama", tokenizer=True, name="other")
    tensors = load_file(other / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    windows = windows_of.load(Checkpoint.open(str(base)), text, 32, None, 100)
    message, _ = refused(1, measure, [base, other], windows)
    assert "model.layers.1.mlp.up_proj.weight" in message
