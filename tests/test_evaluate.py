"""quantkit.evaluation.evaluate against transformers: whole models, whole logits, one window after another."""

import functools
import hashlib
import json
import math
import shutil
from importlib.metadata import version
from pathlib import Path

import families
import jobs
import jsonschema
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sums import assert_sums
from torch.nn.functional import log_softmax
from typer.testing import CliRunner

from quantkit import cli
from quantkit.errors import NOT_FOUND, UNSUPPORTED, USAGE, QuantkitError
from quantkit.evaluation import evaluate, metrics, stream
from quantkit.evaluation import windows as windows_of
from quantkit.models.files.open import open_checkpoint
from quantkit.models.gguf.tokenizer_hash import tokenizer_sha256

CPU = torch.device("cpu")
ALL = metrics.select(None)
NO_FLOOR = ALL - {"floor"}
HELDOUT = Path(__file__).parents[1] / "heldout" / "heldout.txt"


def measure(folders: list, windows: windows_of.Windows, dtype=torch.float32, chosen=NO_FLOOR) -> list[dict]:
    return evaluation(folders, windows, dtype, chosen)["models"]


def evaluation(folders: list, windows: windows_of.Windows, dtype=torch.float32, chosen=ALL, trials=()):
    checkpoints = [open_checkpoint(str(folder)) for folder in folders]
    return evaluate.evaluate(checkpoints, windows, dtype, CPU, trials=trials, chosen=chosen)


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
    generator = torch.Generator().manual_seed(0)
    with jobs.edited(folder) as tensors:
        for tensor in tensors.values():
            if tensor.ndim == 2:
                noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
                tensor += share * tensor.std() * noise
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
    windows = windows_of.load(open_checkpoint(str(demo_model)), HELDOUT, 128, None, 400)
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
        found = result["metrics"]
        assert found["nll"]["value"] == pytest.approx(losses.mean().item(), abs=1e-4)
        stderr = losses.std(correction=1).item() / math.sqrt(len(losses))
        assert found["nll"]["stderr"] == pytest.approx(stderr, abs=1e-4)
        assert found["ppl"]["value"] == math.exp(found["nll"]["value"])
        assert found["ppl"]["stderr"] == found["ppl"]["value"] * found["nll"]["stderr"]
    of_base, of_copy = (result["metrics"] for result in results)
    assert of_base["kld"] is of_base["dppl"] is of_base["top1"] is None
    assert (
        of_base["nll"]["value"] < of_copy["nll"]["value"] < 5
    )  # trained: an untrained one has log(4096) = 8.3
    found, kld = of_copy["kld"], (logs[0].exp() * (logs[0] - logs[1])).sum(1)
    assert found["mean"] == pytest.approx(kld.mean().item(), abs=1e-5) and found["mean"] > 0.01
    assert found["max"] == pytest.approx(kld.max().item(), rel=1e-3)
    assert found["median"] == pytest.approx(np.median(kld.numpy()), rel=1e-3)
    assert found["p99"] == pytest.approx(np.percentile(kld.numpy(), 99), rel=1e-3)
    assert of_copy["top1"] == (logs[0].argmax(1) == logs[1].argmax(1)).double().mean().item() < 1


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(("ctx", "stride"), [(32, None), (32, 31), (17, 2)])
def test_windows_are_a_literal_sliding_window(tiny_model, text, bos, ctx, stride):
    """Every text token in reach is scored once, given all the tokens its window holds before it."""
    folder = tiny_model("llama", tokenizer="bos" if bos else True)
    windows = windows_of.load(open_checkpoint(str(folder)), text, ctx, stride, 200)
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
    nll = measure([folder], windows)[0]["metrics"]["nll"]["value"]
    assert nll == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_long_windows_are_measured_in_chunks(tiny_model, text, monkeypatch):
    """Neither the size of a chunk of logits nor of a batch of windows changes what is measured."""
    folder = tiny_model("llama", tokenizer=True)
    other = perturbed(folder, folder.with_name("other"))
    windows = windows_of.load(open_checkpoint(str(folder)), text, 64, 48, 400)
    whole = measure([folder, other], windows)
    monkeypatch.setattr(stream, "CHUNK_BYTES", 4 * 512 * 7)
    monkeypatch.setattr(evaluate, "BATCH_TOKENS", 3 * 64)
    pieces = measure([folder, other], windows)
    for one, two in zip(whole, pieces, strict=True):
        assert two["metrics"]["nll"]["value"] == pytest.approx(one["metrics"]["nll"]["value"], abs=1e-6)
    apart, together = (found[1]["metrics"]["kld"]["mean"] for found in (pieces, whole))
    assert apart == pytest.approx(together, abs=1e-6) and together > 0


def test_several_models_are_compared_to_the_first(tiny_model, text):
    base = tiny_model("llama", tokenizer=True, dtype="bfloat16")
    near, far = (perturbed(base, base.with_name(f"{share}"), share) for share in (0.1, 0.5))
    shutil.copytree(base, copy := base.with_name("copy"))
    windows = windows_of.load(open_checkpoint(str(base)), text, 64, None, 300)
    results = measure([base, near, copy, far], windows)
    assert [Path(result["source"]).name for result in results] == ["llama", "0.1", "copy", "0.5"]
    of_base, of_near, of_copy, of_far = (result["metrics"] for result in results)
    assert of_base["kld"] is None and of_copy["top1"] == 1
    assert of_copy["kld"] == dict.fromkeys(("mean", "stderr", "median", "p99", "max"), 0)
    assert of_copy["nll"] == of_base["nll"]
    assert of_copy["dppl"] == dict.fromkeys(("value", "stderr", "relative", "relative_stderr"), 0)
    assert 0 < of_near["kld"]["mean"] < of_far["kld"]["mean"] and 1 > of_near["top1"] > of_far["top1"]
    alone = measure([far], windows)[0]["metrics"]
    assert alone["kld"] is None
    assert_sums(alone["nll"], of_far["nll"])
    reverse = measure([far, base], windows)[1]["metrics"]
    assert reverse["kld"]["mean"] != of_far["kld"]["mean"]
    assert_sums(reverse["nll"], of_base["nll"])
    back, forth = reverse["dppl"], of_far["dppl"]
    assert_sums((-back["value"], back["stderr"]), (forth["value"], forth["stderr"]), 1e-5)


@pytest.mark.parametrize("options", ["--bits 3 --no-sym --act-order full --exclude q_proj"])
def test_a_quantized_folder_measures_like_its_dense_decode(tiny_model, text, options):
    base = tiny_model("llama", tokenizer=True)
    packed, dense = base.with_name("packed"), base.with_name("dense")
    small = f"--group-size 32 --samples 2 --seqlen 32 --threads 1 --calibration {text} -o {packed}"
    done = CliRunner().invoke(cli.app, ["gptq", str(base), *small.split(), *options.split()])
    assert done.exit_code == 0, done.exception
    checkpoint = open_checkpoint(str(packed))
    shutil.copytree(base, dense)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names}
    assert tensors.keys() == open_checkpoint(str(base)).infos.keys() < set(tensors) | set(checkpoint.infos)
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    windows = windows_of.load(open_checkpoint(str(base)), text, 64, None, 300)
    of_base, of_packed, of_dense = measure([base, packed, dense], windows)
    assert_sums(of_packed["metrics"], of_dense["metrics"], 1e-5)
    assert of_packed["metrics"]["kld"]["mean"] > 0
    bits = [result["size"]["bits_per_weight"] for result in (of_packed, of_dense, of_base)]
    assert bits[0] < 32 == bits[1] == bits[2]
    stored = load_file(packed / "model.safetensors")
    assert of_packed["size"]["weight_bytes"] == sum(tensor.nbytes for tensor in stored.values())
    assert of_dense["size"]["bits_per_quantized_weight"] is None
    kinds = ("qweight", "qzeros", "scales", "g_idx")
    packed_bytes = sum(tensor.nbytes for name, tensor in stored.items() if name.endswith(kinds))
    linears = [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]
    weights = sum(tensors[f"{name}.weight"].numel() for name in linears)
    assert of_packed["size"]["bits_per_quantized_weight"] == 8 * packed_bytes / weights


def test_sixteen_bit_passes_are_the_models_own(tiny_model, text):
    folder = tiny_model("llama", tokenizer=True)
    windows = windows_of.load(open_checkpoint(str(folder)), text, 64, None, 128)
    half = measure([folder], windows, torch.bfloat16)[0]["metrics"]["nll"]["value"]
    with torch.no_grad():
        logs = log_softmax(load(folder, torch.bfloat16)(windows.ids).logits[:, :-1].float(), -1)
    expected = -logs.gather(2, windows.ids[:, 1:, None]).double().mean().item()
    assert half == pytest.approx(expected, abs=1e-4)
    assert half != measure([folder], windows)[0]["metrics"]["nll"]["value"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_noise_floor_is_the_base_in_the_other_precision(tiny_model, text, monkeypatch, dtype):
    """As if the base, computed in the other precision, were a candidate; its first windows only."""
    base = tiny_model("llama", tokenizer=True)
    shutil.copytree(base, copy := base.with_name("copy"))
    monkeypatch.setattr(evaluate, "FLOOR_TOKENS", 130)
    monkeypatch.setattr(evaluate, "BATCH_TOKENS", 64)
    windows = windows_of.load(open_checkpoint(str(base)), text, 32, 24, 400)
    found = evaluation([base, copy], windows, dtype)
    floor = found["noise_floor"]
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    assert str(other) == f"torch.{floor['dtype']}" and floor["tokens"] == 31 + 3 * 24
    logs = {
        kind: log_softmax(load(base, kind)(windows.ids[:4]).logits[:, :-1].float(), -1).double()
        for kind in (dtype, other)
    }
    scored = torch.ones(4, 31, dtype=torch.bool)
    scored[1:, :7] = False
    kld = (logs[dtype].exp() * (logs[dtype] - logs[other])).sum(2)[scored]
    assert floor["metrics"]["kld"]["mean"] == pytest.approx(kld.mean().item(), rel=0.02)
    assert 0 < floor["metrics"]["kld"]["mean"] < 1e-3 and found["models"][1]["metrics"]["kld"]["mean"] == 0
    same = (logs[dtype].argmax(2) == logs[other].argmax(2))[scored]
    assert floor["metrics"]["top1"] == pytest.approx(same.double().mean().item(), abs=0.011)
    assert evaluation([base], windows, dtype)["noise_floor"] is None  # nothing to compare with it
    assert evaluation([base, copy], windows, dtype, NO_FLOOR)["noise_floor"] is None


def test_only_what_is_chosen_is_measured(tiny_model, text):
    base = tiny_model("llama", tokenizer=True)
    other = perturbed(base, base.with_name("other"))
    windows = windows_of.load(open_checkpoint(str(base)), text, 32, None, 200)
    whole = measure([base, other], windows)[1]["metrics"]
    for chosen in ({"ppl"}, {"dppl"}, {"kld"}, {"top1"}):
        found = measure([base, other], windows, chosen=frozenset(chosen))[1]["metrics"]
        assert (found["nll"], found["ppl"]) == (whole["nll"], whole["ppl"])
        for name in ("dppl", "kld", "top1"):
            assert found.get(name) == (whole[name] if name in chosen else None)


def test_a_trial_measures_like_what_it_would_write(tiny_model, text):
    base = tiny_model("llama", tokenizer=True, hidden_size=64)
    written = base.with_name("written")
    done = CliRunner().invoke(cli.app, ["nf4", str(base), "-o", str(written), "--dtype", "float32"])
    assert done.exit_code == 0, done.exception
    windows = windows_of.load(open_checkpoint(str(base)), text, 32, None, 200)
    found = evaluation([base, written], windows, chosen=NO_FLOOR, trials=["nf4"])["models"]
    assert found[2]["source"] == f"{base} as nf4"
    assert found[2]["metrics"] == found[1]["metrics"]
    planned, stored = found[2]["size"], found[1]["size"]  # the JSON inside a tensor has a digit more or less
    assert planned["weight_bytes"] == pytest.approx(stored["weight_bytes"], rel=1e-4)
    planned, stored = (size["bits_per_quantized_weight"] for size in (planned, stored))
    assert planned == pytest.approx(stored, rel=1e-3) and stored < 7


def test_a_gguf_file_is_measured_beside_its_source(short_demo, tmp_path):
    path = tmp_path / "demo.gguf"
    words = f"gguf {short_demo} -t Q8_0 --solver rtn --imatrix none -o {path} -q --json"
    assert CliRunner().invoke(cli.app, words.split()).exit_code == 0
    windows = windows_of.load(open_checkpoint(str(short_demo)), HELDOUT, 128, None, 256)
    found = evaluation([short_demo, path], windows, chosen=NO_FLOOR)["models"][1]
    assert 0 < found["metrics"]["kld"]["mean"] < 0.001
    assert (
        found["size"]["bits_per_quantized_weight"] == 8.5
        and found["size"]["disk_bytes"] == path.stat().st_size
    )


# ---- the record


def test_the_record_has_exactly_this_shape(tiny_model, text):
    base = tiny_model("llama", tokenizer="bos", tie_word_embeddings=True)
    shutil.copytree(base, copy := base.with_name("copy"))
    arguments = f"eval {base} {copy} --text {text} --ctx 32 --stride 16 --limit 100 --json -q".split()
    done = CliRunner().invoke(cli.app, arguments)
    record = json.loads(done.stdout)
    weights = sum(tensor.numel() for tensor in load_file(base / "model.safetensors").values())
    found = [row.pop("metrics") for row in record["models"]]
    env, floor = record.pop("env"), record.pop("noise_floor")
    assert env["device"] == "cpu" and env["torch"] == version("torch")
    assert (floor["dtype"], floor["tokens"]) == ("bfloat16", record["data"]["tokens"])
    assert 0 < floor["metrics"]["kld"]["mean"] < 1e-3
    steps = (100 - 31) // 16
    assert record == {
        "schema": "quantkit.eval/3",
        "data": {
            "text": "text.txt",
            "sha256": hashlib.sha256(text.read_bytes()).hexdigest(),
            "tokens": 31 + 16 * steps,
            "ctx": 32,
            "stride": 16,
            "bos": True,
            "tokenizer": tokenizer_sha256(open_checkpoint(str(copy)).tokenizer),
            "dtype": "float32",
        },
        "models": [
            {
                "source": str(folder),
                "size": {
                    "disk_bytes": sum(path.stat().st_size for path in folder.iterdir()),
                    "weight_bytes": 4 * weights,
                    "bits_per_weight": 32.0,
                    "bits_per_quantized_weight": None,
                },
                "tasks": None,
                "kv": None,
                "weights_only": False,
                "engine": None,
            }
            for folder in (base, copy)
        ],
        "engine_declined": {},
        "pareto": {
            "size": "size.weight_bytes",
            "loss": "metrics.kld.mean",
            "models": sorted(map(str, (base, copy))),
        },
        "gates": [],
        "tasks": None,
    }
    value = found[0]["nll"]["value"]
    assert 5.5 < value < 7.5  # log(512) = 6.2
    stderr = found[0]["nll"]["stderr"]
    assert 0 < stderr < 0.2
    assert found[0] == {
        "nll": {"value": value, "stderr": stderr},
        "ppl": {"value": math.exp(value), "stderr": math.exp(value) * stderr},
        "dppl": None,
        "kld": None,
        "top1": None,
    }
    assert found[1] == found[0] | {
        "dppl": {"value": 0, "stderr": 0, "relative": 0, "relative_stderr": 0},
        "kld": {"mean": 0, "stderr": 0, "median": 0, "p99": 0, "max": 0},
        "top1": 1,
    }


def test_what_is_printed_fits_the_shipped_schema(tiny_model, text):
    """With everything in it that can be: a trial, the noise floor, gates."""
    base = tiny_model("llama", tokenizer=True, hidden_size=64)
    words = f"eval {base} --as nf4 --text {text} --ctx 32 --limit 200 --json -q"
    for more in ("--max-kld 9 --max-ppl-increase 900%", "--metrics ppl", "--metrics dppl,top1"):
        done = CliRunner().invoke(cli.app, f"{words} {more}".split())
        record = json.loads(done.stdout)
        schema = (Path(evaluate.__file__).parent / "comparison" / "eval-3.json").read_text()
        jsonschema.validate(record, json.loads(schema), jsonschema.Draft202012Validator)
        assert len(record["gates"]) == (2 if "max" in more else 0)


def test_a_model_that_broke_is_recorded_and_fails_its_gates(tiny_model, text):
    """Its perplexity is beyond any number, which JSON writes as null."""
    base = tiny_model("llama", tokenizer=True)
    shutil.copytree(base, other := base.with_name("other"))
    with jobs.edited(other) as tensors:
        tensors["model.norm.weight"] *= 1e6
    words = f"eval {base} {other} --text {text} --ctx 32 --limit 200 --json -q --max-ppl-increase 2%"
    done = CliRunner().invoke(cli.app, words.split())
    record = json.loads(json.dumps(done.exception.found), parse_constant=pytest.fail)
    broken = record["models"][1]["metrics"]
    assert broken["nll"]["value"] > 1000
    assert broken["ppl"] == {"value": None, "stderr": None}
    assert broken["dppl"]["value"] is broken["dppl"]["relative"] is None
    (verdict,) = record["gates"]
    assert verdict["value"] is None and not verdict["pass"] and done.exception.exit_code == 7


def test_the_protocol_follows_the_model_unless_told(tiny_model, text):
    def protocol(folder: Path, *arguments) -> tuple:
        made = windows_of.load(open_checkpoint(str(folder)), text, *arguments).protocol
        return made.ctx, made.stride, made.bos, made.tokens

    text.write_text("\n".join(families.sentences()) * 3)
    assert protocol(tiny_model("llama", tokenizer=True), None, None, 1000) == (256, 256, False, 3 * 255)
    unlimited = tiny_model("bloom", tokenizer="bos")
    assert protocol(unlimited, None, None, 5000) == (2048, 2048, True, 2 * 2047)
    assert protocol(unlimited, 100, 50, 5000)[:2] == (100, 50)


# ---- what cannot be compared, or measured


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ("vocab", "the vocabulary has 513 tokens instead of 512, it adds 'never'"),
        ("merges", "the tokens are the same, but not their ids, merges or the way to cut a text"),
    ],
)
def test_different_tokenizers_are_refused(tiny_model, text, changed, difference):
    """See test_gguf_tokenizer_files for all that makes tokenizers different."""
    base, other = (
        tiny_model("llama", tokenizer=True, name=name, vocab_size=576) for name in ("base", "other")
    )
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    if changed == "vocab":
        content["model"]["vocab"]["never"] = 512
    else:
        content["model"]["merges"].pop()
    path.write_text(json.dumps(content))
    windows = windows_of.load(open_checkpoint(str(base)), text, 32, None, None)
    message, _ = refused(UNSUPPORTED, measure, [base, other], windows)
    assert message == f"{other} and {base} have different tokenizers: {difference}"


def test_equal_files_of_tokenizers_are_loaded_once(demo_model, tmp_path):
    shutil.copytree(demo_model, tmp_path / "copy")
    pair = [open_checkpoint(str(folder)) for folder in (demo_model, tmp_path / "copy")]
    evaluate.check_comparable(pair)
    assert "tokenizer" not in vars(pair[1])
    path = tmp_path / "copy" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text())))  # other bytes, the same tokenizer
    evaluate.check_comparable(pair)
    assert "tokenizer" in vars(pair[1])


@pytest.mark.parametrize("sizes", [(512, 576), (576, 512)])
def test_different_vocabularies_are_refused(tiny_model, text, sizes):
    folders = [tiny_model("llama", tokenizer=True, name=f"{size}", vocab_size=size) for size in sizes]
    windows = windows_of.load(open_checkpoint(str(folders[0])), text, 32, None, 200)
    message, _ = refused(UNSUPPORTED, measure, folders, windows)
    assert all(str(folder) in message for folder in folders) and all(str(size) in message for size in sizes)


def test_windows_longer_than_any_models_context_are_refused(tiny_model, text):
    base = tiny_model("gpt2", tokenizer=True)
    short = tiny_model("gpt2", tokenizer=True, name="short", max_position_embeddings=32)
    message, hint = refused(USAGE, windows_of.load, open_checkpoint(str(short)), text, 33, None, None)
    assert "--ctx 33" in message and "context 32" in message and hint == "use --ctx 32"
    windows = windows_of.load(open_checkpoint(str(base)), text, 64, None, 200)
    message, hint = refused(USAGE, measure, [base, short], windows)
    assert "--ctx 64" in message and str(short) in message and hint == "use --ctx 32"


@pytest.mark.parametrize(
    ("ctx", "stride", "limit", "words"),
    [
        (1, None, None, "--ctx 1"),
        (32, 33, None, "--stride 33"),
        (32, 0, None, "--stride 0"),
        (32, None, 0, "--limit 0"),
        (32, None, 31, "--limit leaves 31 tokens; one window needs 32"),
    ],
)
def test_sizes_that_make_no_measurement(tiny_model, text, ctx, stride, limit, words):
    checkpoint = open_checkpoint(str(tiny_model("llama", tokenizer=True)))
    message, hint = refused(USAGE, windows_of.load, checkpoint, text, ctx, stride, limit)
    assert words in message and hint


def test_what_fills_no_window_is_told_where_it_is_much(tiny_model, text, quantkit):
    model = tiny_model("llama", tokenizer=True)
    checkpoint = open_checkpoint(str(model))
    whole = windows_of.load(checkpoint, text, 32, None, 320)
    assert (len(whole.ids), whole.left, whole.note) == (10, 0, None)
    cut = windows_of.load(checkpoint, text, 32, None, 95)
    assert (len(cut.ids), cut.left) == (2, 31)
    done = quantkit("eval", model, "--text", text, "--ctx", 32, "--limit", 95)
    words = f"31 tokens of {text.name} after the last whole window of 32 are not measured"
    assert cut.note == words and words in " ".join(done.err.split())


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
    checkpoint = open_checkpoint(str(tiny_model("llama", tokenizer=True)))
    message, hint = refused(code, windows_of.load, checkpoint, path, None, None, None)
    assert "other.txt" in message and words in message and hint
