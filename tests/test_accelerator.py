"""Every command on an accelerator (accelerator.py): the double writes the CPU's bytes, a real one nearly."""

import io
import json
import weakref
from pathlib import Path

import families
import numpy as np
import pytest
import torch
from accelerator import DEVICE, NAME, REAL, exact_products, far_apart, present
from nights import by_day, nightly
from sums import assert_sums

from quantkit.auto import job as budget_job
from quantkit.auto import sensitivities
from quantkit.auto.options import AutoOptions, AutoRequest
from quantkit.distillation.student import Student
from quantkit.grids import parallel
from quantkit.grids.affine import AffineGrid
from quantkit.grids.float8 import Float8Grid
from quantkit.grids.fp4 import MxFp4Grid, NvFp4Grid
from quantkit.grids.ggml import TYPES, named
from quantkit.grids.int8 import Int8Grid
from quantkit.grids.nf4 import Nf4Grid
from quantkit.layouts import Statistic
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout
from quantkit.layouts.compressed_tensors.integers import PackQuantized
from quantkit.layouts.ggml.blocks import encode_rows, pack
from quantkit.models.files.gguf_file import read_header
from quantkit.models.files.open import open_checkpoint
from quantkit.models.gguf import imatrix
from quantkit.models.gguf.file_types import BLOCKS, NEED_IMPORTANCE, NO_FEEDBACK
from quantkit.models.machine import expert_share
from quantkit.models.machine.device import choose_device, widens
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import capture
from quantkit.quantize.calibrate.capture import SiteSums
from quantkit.quantize.calibrate.states import States
from quantkit.quantize.calibrate.statistics import Drift, SiteStatistics
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers import replay, rtn
from quantkit.quantize.solvers.gptq import GptqSolver
from quantkit.quantize.solving import solve
from quantkit.quantize.staging import folder as staging

double_only = pytest.mark.skipif(REAL, reason="only the double counts, limits or lacks this")
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
MIXTURE = {"hidden_size": 32, "intermediate_size": 32, "num_local_experts": 2}
CALIBRATED = ["--samples", "4", "--seqlen", "32", "--batch-size", "2"]
CPU = torch.device("cpu")
SMALL = ["--group-size", "32"]
PLAIN = ["--transform", "none", "--refine", "0"]  # where what they do is tested beside
FEW = ["--candidates", "3", "--no-search-scale"]


@pytest.fixture
def source(tiny_model) -> Path:
    return tiny_model("llama", tokenizer=True, **SIZES)


@pytest.fixture
def far(quantkit):
    """`far("gptq", ..., limit=2**20)` runs a command on the double; keywords set what the device can do."""

    def run(*arguments, code: int = 0, **device):
        if REAL and device:
            pytest.skip(f"only the double has {', '.join(device)}")
        with present():
            for name, value in ({"strict_products": True} | device).items():
                setattr(DEVICE, name, value)
            done = quantkit(*arguments, "--device", NAME)
        assert done.code == code, done.err
        assert DEVICE.launches, "nothing ran on the device"
        return done

    return run


@pytest.fixture
def both(far, quantkit, tmp_path):
    """`both("gptq", model)` runs a command on the CPU and on the double: both output folders."""

    def run(*arguments, **device) -> tuple[Path, Path]:
        ending = {"sample": ".jsonl", "gguf": ".gguf"}.get(arguments[0], "")
        ending = ".gguf" if "made.gguf" in arguments else ending  # the student of distill
        on_cpu, on_far = (tmp_path / f"{name}{ending}" for name in ("on-cpu", "on-far"))
        options = (*arguments, "--dtype", "float32", "-q")
        done = quantkit(*options, "-o", on_cpu, "--device", "cpu")
        assert done.code == 0, done.err
        far(*options, "-o", on_far, **device)
        return on_cpu, on_far

    return run


def same_tensors(a: Path, b: Path) -> None:
    if REAL:
        nearly_the_same(a, b)
        return
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


def nearly_the_same(a: Path, b: Path) -> None:
    """The linears of two jobs have lost as much, and no weight is another one."""
    assert far_apart(a, b) == []
    left, right = (json.loads((place / "quantkit.json").read_text())["linears"] for place in (a, b))
    left, right = ({row["name"]: row["error"] for row in rows if row.get("error")} for rows in (left, right))
    assert right == pytest.approx(left, rel=0.2, abs=1e-6)


def same_file(a: Path, b: Path) -> None:
    """The same tensors in two GGUF files, whose metadata name the device that made them."""
    if REAL:
        assert far_apart(a, b) == []
        return
    (_, left), (_, right) = read_header(a), read_header(b)
    assert list(left) == list(right)
    for name, info in left.items():
        found = [
            np.fromfile(p, np.uint8, i.nbytes, offset=i.offset) for p, i in ((a, info), (b, right[name]))
        ]
        assert np.array_equal(*found), f"{name} of {a.name}"


METHODS = {
    "gptq": ["gptq", *SMALL, *CALIBRATED],
    "gptq full": ["gptq", *SMALL, *CALIBRATED, *PLAIN, "--act-order", "full"],
    "gptq none": ["gptq", *SMALL, *CALIBRATED, *PLAIN, "--act-order", "none"],
    "gptq 3 bit": ["gptq", *SMALL, *CALIBRATED, *PLAIN, "--bits", "3", "--no-sym"],
    "gptq v2": ["gptq", *SMALL, *CALIBRATED, *PLAIN, "--no-sym", "--checkpoint-format", "gptq_v2"],
    "gptq 8 bit": ["gptq", *SMALL, *CALIBRATED, *PLAIN, "--bits", "8", "--no-search-scale"],
    "gptq ct": ["gptq", *SMALL, *CALIBRATED, *PLAIN, "--layout", "compressed-tensors"],
    "gptq mlx": ["gptq", *SMALL, *CALIBRATED, *PLAIN, "--layout", "mlx", "--bits", "3", "--embedding", "4"],
    "gptq repeat": ["gptq", *SMALL, *CALIBRATED, *PLAIN, "--sequential", "repeat"],
    "gptq original": ["gptq", *SMALL, *CALIBRATED, *PLAIN, "--target", "original"],
    "gptq head": ["gptq", *SMALL, *CALIBRATED, *PLAIN, "--head", "8"],
    "gptq rtn": ["gptq", *SMALL, "--solver", "rtn"],
    "nf4": ["nf4"],
    "nf4 single": ["nf4", "--no-double-quant"],
    "nf4 gptq": ["nf4", "--solver", "gptq", *CALIBRATED, "--transform", "none"],
    "nvfp4 rtn": ["fp4", "--solver", "rtn"],
    "nvfp4 inputs": ["fp4", *CALIBRATED, *PLAIN, "--activations"],
    "mxfp4": ["fp4", "--format", "mxfp4", *CALIBRATED, *PLAIN],
    "mlx nvfp4": ["fp4", *CALIBRATED, *PLAIN, "--layout", "mlx"],
    "int8": ["int8"],
    "int8 unread": ["int8", "--allow-unread"],  # which no client loads experts of
    "fp8 static": ["fp8", *CALIBRATED, "--static", "--kv-cache"],
    "w8a8": ["w8a8", *CALIBRATED],
    "fp8 modelopt": ["fp8", *CALIBRATED, "--static", "--solver", "gptq", *PLAIN, "--layout", "modelopt"],
    "fp8 gptq": ["fp8", *CALIBRATED, "--solver", "gptq", *PLAIN],
    "awq": ["awq", *SMALL, *CALIBRATED, "--candidates", "4"],
    "awq gptq": ["awq", *SMALL, *CALIBRATED, *FEW, "--solver", "gptq"],
    "awq ct": ["awq", *SMALL, *CALIBRATED, *FEW, "--layout", "compressed-tensors"],
}


DAY = {"gptq", "nvfp4 inputs", "int8", "w8a8", "awq"}
TWO_BLOCKS = ("gptq", "gptq repeat", "gptq original", "fp8 static", "nf4")  # others: one, columns cost


@pytest.mark.parametrize("method", by_day(sorted(METHODS.keys() - {"int8 unread"}), DAY))
def test_a_method_writes_the_bytes_of_the_cpu(both, tiny_model, method):
    name, *rest = METHODS[method]
    blocks = 2 if method in TWO_BLOCKS else 1
    source = tiny_model("llama", tokenizer=True, **SIZES | {"num_hidden_layers": blocks})
    on_cpu, on_far = both(name, source, *rest)
    same_tensors(on_cpu, on_far)
    kept, manifest = (json.loads((folder / "quantkit.json").read_text()) for folder in (on_cpu, on_far))
    assert manifest["linears"] == kept["linears"] or REAL
    assert manifest["job"]["execution"]["device"] == NAME


@pytest.mark.parametrize("method", ["gptq", *nightly("int8 unread", "awq")])
def test_a_mixture_has_the_bytes_of_the_cpu(both, tiny_model, method):
    name, *rest = METHODS[method]
    model = tiny_model("mixtral", tokenizer=True, num_hidden_layers=1, **MIXTURE)
    same_tensors(*both(name, model, *rest))


@pytest.mark.parametrize("method", ["gptq repeat", *nightly("int8 unread", "awq gptq")])
def test_a_mixture_whose_experts_are_streamed_has_the_bytes_of_the_cpu(both, tiny_model, method, monkeypatch):
    monkeypatch.setattr(expert_share, "SHARE", 0.0)
    name, *rest = METHODS[method]
    model = tiny_model("mixtral", tokenizer=True, num_hidden_layers=1, **MIXTURE)
    same_tensors(*both(name, model, *rest))


@pytest.mark.parametrize(("kind", "states"), nightly(("gemma3n", "host"), ("gemma4", "device")))
def test_several_streams_have_the_bytes_of_the_cpu(both, tiny_model, kind, states):
    """What waits on the host becomes wider where blocks leave keys and values for others."""
    model = tiny_model(kind, tokenizer=True)
    same_tensors(*both("gptq", model, *SMALL, *CALIBRATED, *PLAIN, "--states", states))


GGUF = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.fixture
def blocks_of_256(tiny_model) -> Path:
    return tiny_model("llama", tokenizer=True, **GGUF)


def test_gguf_files_have_the_bytes_of_the_cpu(far, quantkit, blocks_of_256, tmp_path):
    """Of every type of block, encode_rows alone shows the same, below."""
    asked = ["gguf", blocks_of_256, "--solver", "rtn", *CALIBRATED, "--dtype", "float32", "-q"]
    names = ["Q4_K_M", "NVFP4"]
    for name in names:
        asked += ["-t", name]
    on_cpu, on_far = tmp_path / "cpu", tmp_path / "far"
    assert quantkit(*asked, "-o", on_cpu, "--device", "cpu").code == 0
    far(*asked, "-o", on_far)
    assert len(list(on_cpu.glob("*.gguf"))) == len(names)
    for path in on_cpu.glob("*.gguf"):
        same_file(path, on_far / path.name)


@pytest.mark.nightly
def test_error_feedback_in_a_gguf_file_has_the_bytes_of_the_cpu(both, source):
    same_file(*both("gguf", source, "-t", "Q4_0", *CALIBRATED, *PLAIN))


BLOCKS_BY_DAY = ("BF16", "Q4_0", "Q2_K", "Q6_K", "IQ2_XXS", "IQ4_XS", "NVFP4")


@pytest.mark.parametrize("name", by_day(sorted(BLOCKS), BLOCKS_BY_DAY))
def test_blocks_have_the_bytes_of_the_cpu(name):
    """Rounded with an importance of the columns and without, and with error feedback where it may be."""
    generator = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(2, 256, generator=generator), torch.randn(300, 256, generator=generator)
    hessian, importance = inputs.t() @ inputs, torch.rand(256, generator=generator)

    def work(weight, hessian, importance) -> list[torch.Tensor]:
        made = [encode_rows(name, weight, importance)]
        if name not in NEED_IMPORTANCE:
            made.append(encode_rows(name, weight))
        if name not in {"F32", "F16", "BF16", *NO_FEEDBACK}:
            grid = named(name)
            solver = GptqSolver(act_order="none", refine=1)
            solved = solver.quantize([weight], grid, hessian.clone()).weights[0]
            made.append(pack(grid, solved.codes, solved.params))
        return made

    on_cpu = work(weight, hessian, importance)
    with present():
        on_far = work(*(part.to(NAME) for part in (weight, hessian, importance)))
        for found, wanted in zip(on_far, on_cpu, strict=True):
            assert found.device.type == torch.device(NAME).type and found.shape == wanted.shape
            assert torch.equal(found.cpu(), wanted) or REAL
        assert (on_far[0].cpu() == on_cpu[0]).float().mean() > 0.95  # without error feedback


def test_an_importance_matrix_is_that_of_the_cpu(both, blocks_of_256):
    on_cpu, on_far = both("imatrix", blocks_of_256, *CALIBRATED)
    if not REAL:
        assert on_cpu.read_bytes() == on_far.read_bytes()
    found, wanted = (imatrix.read(path).values() for path in (on_far, on_cpu))
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=1e-4, atol=1e-7)


# ---- reading, measuring, running


def close(found, wanted) -> None:
    """Two JSON records are equal, numbers nearly: a device may add up in another order."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted.keys() - {"device", "seconds"}:
            close(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for pair in zip(found, wanted, strict=True):
            close(*pair)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    else:
        assert found == wanted


def near(found, wanted) -> None:
    """Two evaluations agree in their means. LLM.int8 rounds activations: one next to a midpoint moves by a
    whole step for another last bit, which single tokens show."""
    for ours, theirs in zip(found["models"], wanted["models"], strict=True):
        ours, theirs = ours["metrics"], theirs["metrics"]
        assert ours["nll"]["value"] == pytest.approx(theirs["nll"]["value"], rel=1e-4)
        if theirs["kld"]:
            assert ours["kld"]["mean"] == pytest.approx(theirs["kld"]["mean"], rel=0.1)


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(families.sentences(60, seed=1)))
    return path


@pytest.mark.parametrize(
    "method",
    [
        "gguf",  # int8 is read there by generate and distill, below
        *nightly(
            "int8", "nf4", "nvfp4 inputs", "gptq full", "gptq ct", "awq", "fp8 static", "w8a8", "fp8 modelopt"
        ),
    ],
)
def test_eval_of_every_layout(far, make, source, blocks_of_256, text, method):
    made = "made.gguf" if method == "gguf" else "made"
    if method == "gguf":
        source, command = blocks_of_256, ["gguf", "-t", "Q4_K_M", "--solver", "rtn", "--imatrix", "none"]
    else:
        command = METHODS[method]
    make(command[0], source, *command[1:], "-o", made)
    asked = ["eval", source, made, "--text", text, "--ctx", 32, "--limit", 320]
    (near if method == "int8" or REAL else close)(json.loads(far(*asked, "--json", "-q").out), make(*asked))


def test_eval_with_a_quantized_cache(far, make, demo_model, text):
    asked = ["eval", demo_model, "--text", text, "--ctx", 32, "--limit", 64, "--metrics", "kld"]
    asked += [part for name in ("q8_0", "fp8") for part in ("--kv-dtype", name)]
    near(json.loads(far(*asked, "--json", "-q").out), make(*asked))


@pytest.mark.nightly
def test_eval_with_tasks(far, make, demo_model, text):
    pytest.importorskip("lm_eval")
    asked = ["eval", demo_model, "--text", text, "--limit", 512, "--ctx", 64]
    asked += ["--tasks", "cloze", "--task-limit", 4]
    (near if REAL else close)(json.loads(far(*asked, "--json", "-q").out), make(*asked))


@pytest.mark.parametrize("options", [[], *nightly(["--temperature", "1", "--seed", "3"])])
def test_generate_continues_as_on_the_cpu(far, make, source, options):
    make("int8", source, "-o", "made")
    asked = ["generate", source, "made", "-p", "Ba da", "-n", 12, "--dtype", "float32", *options]
    found, wanted = json.loads(far(*asked, "--json", "-q").out), make(*asked)
    assert [row["text"] for row in found["models"]] == [row["text"] for row in wanted["models"]]


@double_only
def test_sample_writes_as_on_the_cpu(both, source):
    """CUDA's generator draws other numbers from the same seed."""
    written, there = both("sample", source, "--samples", 2, "--seqlen", 16, "--batch-size", 2)
    assert written.read_text() == there.read_text() != ""


@pytest.mark.parametrize(
    ("family", "options"), [("llama", []), *nightly(("gemma3", ["--temperature", "1", "--seed", "3"]))]
)
def test_chat_keeps_its_cache_there(far, quantkit, tiny_model, monkeypatch, family, options):
    """Turns go on from a cache that is cropped: the template cuts former answers short."""
    model = tiny_model(family, tokenizer="bos", name="chatty")
    parts = "[{{ m.role }}] {{ m.content[:6] }}</s>"
    (model / "chat_template.jinja").write_text(f"<s>{{% for m in messages %}}{parts}{{% endfor %}}[a] ")
    asked = ["chat", model, "-n", 8, "--dtype", "float32", "--json", "-q", *options]

    def talk(run) -> list[dict]:
        monkeypatch.setattr("sys.stdin", io.StringIO("Ba da\nKobu\n/retry\n"))
        rows = [json.loads(line) for line in run(*asked).out.splitlines()]
        return [{key: row[key] for key in ("text", "stop", "tokens")} for row in rows]

    found = talk(far)
    assert found == talk(quantkit) and len(found) == 3
    before, after = (row["tokens"] for row in found[:2])
    assert 0 < after["cached"] < before["prompt"] + before["generated"] - 1


@pytest.mark.nightly
def test_specdec_drafts_and_accepts_as_on_the_cpu(far, make, source):
    make("int8", source, "-o", "draft")
    asked = ["specdec", source, "draft", "prompt-lookup", "--prompts", 1, "--prompt-tokens", 8, "--k", "3"]
    asked += ["--tokens", 8, "--repeats", 1, "--dtype", "float32"]
    found, wanted = json.loads(far(*asked, "--json", "-q").out), make(*asked)
    for one, other in zip(found["drafts"], wanted["drafts"], strict=True):
        assert one["proof"] == other["proof"] and one["proof"]["alike"]
        assert [row["histogram"] for row in one["swept"]] == [row["histogram"] for row in other["swept"]]


@double_only
def test_inspect_leaves_the_device_alone(far, quantkit, source):
    """It decodes one weight at a time, as fast as a disk delivers them: the CPU's work."""
    far("nf4", source, "-o", "made", "-q")
    with present():
        for asked in (["inspect", "made", "--deep"], ["inspect", source, "made"], ["plan", source]):
            assert quantkit(*asked, "-q").code == 0
    assert not DEVICE.launches and not DEVICE.syncs


def attention(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, **_):
    """Attention of operations that the double, too, can go backwards through."""
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    scores = query @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1).to(scores.device)
        scores = scores.masked_fill(later, -1e30)
    return (scores if attn_mask is None else scores + attn_mask).softmax(-1) @ value


@pytest.mark.parametrize("method", ["int8", *nightly("gptq full", "gguf")])
def test_distill_learns_what_it_learns_on_the_cpu(both, make, source, text, method, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    made = "made.gguf" if method == "gguf" else "made"
    command = ["gguf", "-t", "Q4_0", "--solver", "rtn"] if method == "gguf" else METHODS[method]
    make(command[0], source, *command[1:], "-o", made, *(["--imatrix", "none"] if method == "gguf" else []))
    asked = ["--calibration", text, *"--samples 8 --seqlen 32 --epochs 1 --block-epochs 1".split()]
    on_cpu, on_far = both("distill", source, made, *asked)
    found, wanted = (Student(open_checkpoint(str(path)), torch.float32, CPU) for path in (on_far, on_cpu))
    with found.block(0) as ours, wanted.block(0) as theirs:
        for name, value in theirs.floats.items():
            assert torch.allclose(ours.floats[name], value, rtol=1e-3, atol=1e-6), name


def test_gradients_flow_back_there(both, tiny_model, monkeypatch):
    """Of a dense block and a mixture's; a backward pass adds up in another order there."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    model = tiny_model("mixtral", tokenizer=True, num_hidden_layers=1, **MIXTURE)
    with exact_products():
        folders = both("gptq", model, *SMALL, *CALIBRATED, "--solver", "yaqa", *PLAIN)
    on_cpu, on_far = (json.loads((folder / "quantkit.json").read_text()) for folder in folders)
    errors = [{row["name"]: row.get("error") for row in found["linears"]} for found in (on_cpu, on_far)]
    assert errors[1] == pytest.approx(errors[0], rel=0.02)


@pytest.mark.nightly
def test_auto_measures_what_it_measures_on_the_cpu(tiny_model, text, tmp_path, few_tokens):
    """The search alone: what is made of it are other commands' jobs."""
    source, found = tiny_model("llama", tokenizer=True, **SIZES | {"num_hidden_layers": 1}), {}
    for device in ("cpu", NAME):
        typed = {"run.device": device, "run.threads": 1, "calibration.samples": 4, "calibration.seqlen": 32}
        options = AutoOptions(bpw=4.5, engine="vllm", search_tokens=32, text=text, ctx=32)
        request = AutoRequest(str(source), options, typed, output=tmp_path / "out")
        with present(), exact_products():
            prepared = budget_job.prepare(request, Progress(), dry_run=True)
            *_, found[device] = sensitivities.measure(prepared, Progress())
    assert DEVICE.launches, "nothing ran on the device"
    for unit, row in found["cpu"].units.items():
        mean = found[NAME].units[unit]["divergence"]["mean"]
        assert mean == pytest.approx(row["divergence"]["mean"], rel=0.05, abs=1e-6), unit


def test_a_freed_model_keeps_no_head_on_the_host(source):
    with present():
        skeleton = Skeleton(open_checkpoint(str(source)), torch.float32, torch.device(NAME))
        skeleton.load_rest(away=True)
        hidden = skeleton.embed(torch.arange(4)[None])
        assert skeleton.logits(hidden[0]).shape == (4, skeleton.checkpoint.text_config.vocab_size)
        _, on_host = skeleton.model.get_output_embeddings().forward.args
        rows = weakref.ref(on_host.pieces[0])
        del on_host
        skeleton.free()
        assert rows() is None


# ---- what a device can and cannot do


@pytest.mark.parametrize("method", ["int8", *nightly("gptq", "nf4 gptq", "awq gptq")])
def test_a_device_without_float64_or_streams_will_do(both, source, method):
    name, *rest = METHODS[method]
    rest += ["--states", "host"] if "gptq" in method else []
    same_tensors(*both(name, source, *rest, float64=False, streams=False))


@pytest.mark.parametrize(
    "method, states", nightly(("gptq repeat", "disk"), ("gptq", "host"), ("awq", "host"))
)
def test_states_that_wait_elsewhere_change_no_byte(both, source, method, states):
    name, *rest = METHODS[method]
    same_tensors(*both(name, source, *rest, "--states", states))


@pytest.mark.nightly
def test_eval_without_float64(far, make, source, text):
    asked = ["eval", source, "--as", "int8", "--text", text, "--ctx", 32, "--limit", 640]
    near(json.loads(far(*asked, "--json", "-q", float64=False).out), make(*asked))


@pytest.mark.nightly
@double_only
def test_products_that_matter_are_not_rounded_to_tf32(far, source):
    torch.set_float32_matmul_precision("high")  # what some distributions of torch begin with
    try:
        far("gptq", source, *SMALL, *CALIBRATED, "-o", "made", "-q", strict_products=True)
    finally:
        torch.set_float32_matmul_precision("highest")


@double_only
def test_a_device_that_is_not_there(refuse, source):
    error, hint = refuse(4, "gptq", source, "--device", "far")
    assert error == f"device 'far' is not available: torch {torch.__version__} finds none"
    assert "quantkit doctor" in hint
    error, _ = refuse(4, "gptq", source, "--device", "meta", "--dry-run")
    assert error == "device 'meta' is not available: nothing computes there"
    for nonsense in ("nonsense", "CUDA", "", "cuda:x"):
        error, hint = refuse(2, "gptq", source, "--device", nonsense)
        assert error == f"{nonsense!r} is not a device" and "cuda:N" in hint


def test_every_core_is_the_cpu():
    assert choose_device("cpu:1") == choose_device("cpu") == torch.device("cpu")


@double_only
def test_doctor_tells_of_the_device(far, quantkit):
    with present():
        DEVICE.limit = 8 << 30
        found = json.loads(quantkit("doctor", "--json").out)["checks"]["machine"]
    (row,) = [row for row in found if row["name"] == "far:0"]
    assert row["value"] == "8.59 GB of 8.59 GB free" and row["note"].startswith("a double of an accelerator")


# ---- resume, and memory that runs out


@pytest.mark.nightly
def test_a_job_that_was_interrupted_goes_on_there(both, far, source, monkeypatch, tmp_path):
    options = ["gptq", source, *SMALL, *CALIBRATED, *PLAIN]
    on_cpu, _ = both(*options)
    whole = staging.Staging.write_block

    def die(self, index, *arguments):
        if index:
            raise KeyboardInterrupt
        whole(self, index, *arguments)

    asked = [*options, "--dtype", "float32", "-o", tmp_path / "again", "-q"]
    with monkeypatch.context() as patch:
        patch.setattr(staging.Staging, "write_block", die)
        far(*asked, code=130)
    far(*asked, "--resume")
    same_tensors(on_cpu, tmp_path / "again")


MANY = ["--samples", "24", "--seqlen", "64", "--batch-size", "2", *SMALL, *PLAIN]


def peak(far, *arguments) -> int:
    far("gptq", *arguments, *MANY, "-o", "measured", "--overwrite", "-q")
    return DEVICE.peak


@pytest.mark.nightly
@double_only
def test_where_memory_runs_out_the_job_goes_on_with_less(far, source, tmp_path):
    most, least = peak(far, source), peak(far, source, "--sequential", "repeat", "--states", "host")
    assert least < 0.7 * most
    limit = (most + least) // 2
    done = far("gptq", source, *MANY, "--sequential", "suspend", "-o", "made", limit=limit, free=64 << 30)
    assert "far ran out of memory in block 1: continuing with --sequential repeat --states host" in done.err
    assert DEVICE.peak <= limit
    same_tensors(tmp_path / "measured", tmp_path / "made")
    timings = json.loads((tmp_path / "made" / "quantkit-timings.json").read_text())
    assert len(timings["steps_down"]) == 1


@pytest.mark.nightly
@double_only
def test_memory_that_is_short_is_an_error_that_says_what_takes_less(far, source, tmp_path):
    unmeasured = ["--states", "host", "--loss-tokens", "0"]  # so small a model needs more for its loss
    least = peak(far, source, "--sequential", "repeat", *unmeasured)
    asked = ["gptq", source, *MANY, "-o", "made", "-q", *unmeasured]
    done = far(*asked, limit=int(0.9 * least), free=64 << 30, code=5)
    assert "error: far ran out of memory in block 1\n" in done.err
    assert "hint: start again with --batch-size 1 --sequential repeat --overwrite\n" in done.err
    assert not (tmp_path / "made").exists()


@pytest.mark.nightly
@double_only
def test_a_job_whose_memory_ran_out_goes_on_with_states_on_the_host(far, source, tmp_path, monkeypatch):
    most = peak(far, source)
    whole = States.__setitem__

    def full(self, k, hidden):
        whole(self, k, hidden)
        if k:
            raise torch.OutOfMemoryError("far: out of memory")

    asked = ["gptq", source, *MANY, "-o", "made", "-q"]
    with monkeypatch.context() as patch:
        patch.setattr(States, "__setitem__", full)
        done = far(*asked, limit=2 * most, code=5)
    assert "hint: finished blocks are kept: run the same command with --resume --states host\n" in done.err
    far(*asked, "--resume", "--states", "host")
    same_tensors(tmp_path / "measured", tmp_path / "made")


@double_only
def test_what_fits_is_chosen_before_anything_is_loaded(far, make, source):
    asked = ["gptq", source, *MANY, "--loss-tokens", 0, "--dry-run", "--json", "-q"]
    plans = {}
    for way in (["repeat", "device"], ["repeat", "host"]):
        done = far(*asked, "--sequential", way[0], "--states", way[1])
        plans[tuple(way)] = json.loads(done.out)["plan"]["memory_bytes"]
    assert sorted(plans.values(), reverse=True) == list(plans.values())
    for way, need in plans.items():
        found = json.loads(far(*asked, free=int(need / 0.79)).out)["plan"]
        assert (found["execution"]["sequential"], found["execution"]["states"]) == way
        assert found["memory_bytes"] == need
    done = far(*asked[:-2], "-q", free=min(plans.values()) - 1, code=5)
    assert "of memory on far" in done.err and "--batch-size 1" in done.err


@double_only
@pytest.mark.parametrize(
    ("method", "states"),
    [
        ("gptq", "host"),
        *nightly(
            ("nf4", "device"), ("gptq repeat", "host"), ("gptq original", "device"), ("awq gptq", "device")
        ),
    ],
)
def test_a_job_takes_what_was_planned(far, tiny_model, method, states):
    model = tiny_model("llama", tokenizer=True, hidden_size=128, intermediate_size=384, num_hidden_layers=1)
    name, *rest = METHODS[method]
    asked = [name, model, *rest, "--states", states, "-q"]
    if "--samples" in rest:
        asked += ["--samples", "48", "--seqlen", "64", "--batch-size", "4"]
    planned = json.loads(far(*asked, "--dry-run", "--json").out)["plan"]["memory_bytes"]
    far(*asked, "-o", "made")
    assert (0.5 if "--samples" in rest else 0.3) * planned < DEVICE.peak < planned


@double_only
def test_a_solver_holds_three_matrices_of_the_hessians_size():
    """H, H of the tokens that are compared and its factor, a quarter more while that is turned; then two."""
    torch.manual_seed(0)
    inputs, weight = torch.randn(2048, 1024), torch.randn(4, 1024)
    moments = 2 * inputs.T @ inputs / len(inputs)
    with present():
        far = [part.to("far") for part in (moments, moments, 0.01 * torch.randn(2, 4, 1024))]
        drift = Drift(far[1], far[2], outputs=True, tokens=len(inputs))
        statistics = SiteStatistics({Statistic.HESSIAN: far[0], Statistic.DRIFT: drift}, len(inputs))
        del drift
        far.clear()
        solve(GptqSolver(), [weight.to("far")], [AffineGrid(4, 32)], statistics)
        assert 3.25 * moments.nbytes < DEVICE.peak < 3.4 * moments.nbytes
        DEVICE.peak = 0
        solve(GptqSolver(), [weight.to("far")], [AffineGrid(4, 32)], statistics)
        assert 2.25 * moments.nbytes < DEVICE.peak < 2.4 * moments.nbytes


# ---- launches, a GPU's cost


@double_only
@pytest.mark.parametrize(
    "method, most",
    [
        ("gptq", 11),
        *nightly(("gptq --transform none", 9), ("nf4 --solver gptq", 10), ("gptq --refine 0, none", 4)),
        ("awq: scales", 2.1),
        ("awq: clipping", 3),
    ],
)
def test_launches_of_a_column(method, most):
    """At most so many kernels for a column of 512, and no more for a matrix of twice the rows. (CUDA replays
    most of them as one.)"""
    import launches

    run = launches.METHODS[method]
    with present(), torch.inference_mode():
        few, waits = launches.count(run, 32, 512)
        many, as_many_waits = launches.count(run, 64, 512)
    assert many <= few + 32 and few <= most * 512
    assert waits == as_many_waits


GRIDS = [*map(named, TYPES), AffineGrid(4, 128), Nf4Grid(), MxFp4Grid(), NvFp4Grid(divisor=1.0)]
FITTED = [each for each in GRIDS if each.vector_size == 1]
ALIKE = {str(named(name)) for name in ("Q2_K", "Q4_K", "Q5_1")}  # of the kind of Q5_K and Q4_1


@double_only
@pytest.mark.parametrize("grid", by_day(FITTED, [each for each in FITTED if str(each) not in ALIKE]), ids=str)
def test_parameters_are_fitted_without_a_wait_or_a_copy(grid):
    """With the values of the CPU. Only constants are copied, once; CUDA captures all else as a graph."""
    generator, size = torch.Generator().manual_seed(0), grid.sub_size
    weight = torch.randn(64, grid.group_size, generator=generator)
    weight[0], weight[1], weight[2], weight[3] = 0, weight[1].sign(), weight[2] * 1e-20, weight[3].relu()
    importance = torch.rand(grid.group_size, generator=generator)
    grid = grid.together([weight])

    def work(weight, importance) -> dict[str, torch.Tensor]:
        params = grid.fit(weight, importance)
        for k, part in enumerate(weight.split(size, 1)[1:], 1):
            params = grid.refit(part.t(), params, k, importance[k * size : (k + 1) * size])
        return {name: part for name, part in vars(params).items() if part is not None}

    with present():
        for _ in range(2):
            parts = weight.to(NAME), importance.to(NAME)
            DEVICE.launches.clear()
            DEVICE.syncs.clear()
            found = work(*parts)
        assert not DEVICE.syncs and not DEVICE.launches["from host"]
        for name, wanted in work(weight, importance).items():
            assert torch.equal(found[name].cpu(), wanted), name


def test_pieces_stay_in_one_thread(monkeypatch):
    """Another thread has another stream, and a CUDA graph would not record its work."""
    monkeypatch.setattr(parallel, "WHOLE", 1 << 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(parallel, "_pool", None)
    with present():
        for grid in (AffineGrid(4, 128), MxFp4Grid(), named("Q4_0")):
            grid.fit(torch.ones(64, grid.group_size, device=NAME))


@double_only
@pytest.mark.parametrize(
    "rows, columns, grid",
    [
        ((256, 264), 128, AffineGrid(4, 128)),
        *nightly(((320,), 128, named("Q4_0")), ((320,), 256, AffineGrid(4, 128)), ((320,), 128, MxFp4Grid())),
    ],
)
def test_experts_are_one_batch(rows, columns, grid):
    """Launches and waits of eight experts are those of two, and results those of one after another."""
    import launches

    solver, grids = GptqSolver(), [grid] * len(rows)

    def expert(number: int) -> tuple:
        weight, statistics = launches.problem(sum(rows), columns, number)
        return weight.split(rows), grids, statistics.hessian

    counts = []
    with present(), torch.inference_mode():
        experts = [expert(number) for number in range(8)]
        alone = [solver.solve(*one) for one in experts]
        for several in (experts[:1], experts[:2], experts):
            DEVICE.reset()
            DEVICE.here = True
            together = solver.solve_many(several)
            counts.append((DEVICE.launches.total(), DEVICE.syncs.total()))
        for expected, found in zip(alone, together, strict=True):
            for one, other in zip(expected, found, strict=True):
                assert torch.equal(one.weight.codes.cpu(), other.weight.codes.cpu())
                pairs = zip(vars(one.weight.params).values(), vars(other.weight.params).values(), strict=True)
                assert all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs if (a, b) != (None, None))
                assert_sums((one.error, one.rtn_error), (other.error, other.rtn_error))
                assert one.notes == other.notes
    assert counts[1] == counts[2] and counts[1][0] < counts[0][0] + 64


@double_only
@pytest.mark.parametrize("act_order", ["none", "full"])
def test_experts_of_a_batch_keep_their_own_order_and_damping(act_order):
    """A zero Hessian has no order, and one without full rank needs more damping than the others."""
    import launches

    solver, grids = GptqSolver(damp=1e-9, act_order=act_order), [AffineGrid(4, 64)]
    problems = [launches.problem(256, 128, number, CPU) for number in range(3)]
    ones = torch.linspace(1, 2, 128)
    for hessian in (torch.zeros(128, 128), torch.outer(ones, ones)):
        problems[2][1].hessian.copy_(hessian)
        sites = [([weight], grids, statistics.hessian) for weight, statistics in problems]
        alone = [solver.solve(*site)[0] for site in sites]
        for one, (other,) in zip(alone, solver.solve_many(sites), strict=True):
            assert torch.equal(one.weight.values(), other.weight.values())
            assert_sums(one.error, other.error)
            assert (one.fallback, one.notes) == (other.fallback, other.notes)
    assert alone[2].notes and not alone[1].notes


LARGE = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 4, "num_hidden_layers": 1}
EXPERTS = [*CALIBRATED, *PLAIN, "--group-size", "64"]


@double_only
@pytest.mark.parametrize("share", nightly(0.25, 0.0), ids=["resident", "streamed"])
def test_a_mixtures_experts_are_solved_together(both, far, tiny_model, monkeypatch, share):
    """With the bytes of the CPU, which solves them one by one, in the memory that was planned. If memory is
    short, they are fewer at a time."""
    monkeypatch.setattr(expert_share, "SHARE", share)
    model = tiny_model("mixtral", tokenizer=True, **LARGE)
    same_tensors(*both("gptq", model, *EXPERTS))
    # of attention's two sites, twice: with all tokens, and with the original model's; then of all experts'
    assert DEVICE.launches["linalg_cholesky_ex"] == 2 * 2 + 2
    peak = DEVICE.peak
    asked = ["gptq", model, *EXPERTS, "--dtype", "float32", "--dry-run", "--json", "-q"]
    whole = json.loads(far(*asked).out)["plan"]
    assert whole["execution"]["at_once"] == 5 and 0.4 * whole["memory_bytes"] < peak < whole["memory_bytes"]
    less = json.loads(far(*asked, free=int(whole["memory_bytes"])).out)["plan"]
    assert less["execution"]["at_once"] < 5 and less["memory_bytes"] < whole["memory_bytes"]


@double_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_second_moments_of_16_bit_inputs_are_products_in_float32(monkeypatch, dtype):
    """Where the device has such products; their sums are exact here, so every order of adding is equal."""
    inputs = torch.randint(-200, 200, (2, 2, 32, 192)).to(dtype)
    sums = [SiteSums(192, CPU)]
    with present():
        assert not widens(torch.device("far")) and not widens(CPU)
        for able in (False, True):
            monkeypatch.setattr(capture, "widens", lambda device, able=able: able)
            sums.append(SiteSums(192, torch.device("far")))
            DEVICE.launches.clear()
            for batch in inputs.to("far"):
                sums[-1].add(batch)
            assert (DEVICE.launches["mm"], DEVICE.launches["addmm_"]) == ((2, 0) if able else (0, 2))
        monkeypatch.undo()
        for batch in inputs:
            sums[0].add(batch)
        expected, *found = (each.finish().hessian.cpu() for each in sums)
    flat = inputs.flatten(0, 2).double()
    assert torch.equal(expected, (2 * flat.T @ flat / len(flat)).float())
    assert all(torch.equal(expected, each) for each in found)


@double_only
@pytest.mark.parametrize("alone", [False, True])
def test_differences_from_the_original_are_16_bit_products(monkeypatch, alone):
    """Of bfloat16 inputs, where the device has such products; the sums are exact here."""
    torch.manual_seed(0)
    inputs, original = (torch.randint(-200, 200, (32, 192)).bfloat16() for _ in range(2))
    weight = torch.randint(-1, 2, (64, 192)).bfloat16() if alone else None
    drift, flat = (original.float() - inputs.float()).bfloat16().double(), inputs.double()
    short = (drift @ weight.double().T).bfloat16().double() if alone else drift
    expected = torch.stack([short[half].T @ flat[half] for half in (slice(0, 16), slice(16, None))]) * 2 / 32
    with present():
        monkeypatch.setattr(capture, "widens", lambda device: True)
        sums = SiteSums(192, torch.device("far"))
        DEVICE.launches.clear()
        sums.add(
            inputs.to("far"), capture.Counterpart(original.to("far"), weight.to("far") if alone else None)
        )
        assert DEVICE.launches["mm"] == 1 + alone + 2 and not DEVICE.launches["addmm_"]
        made = sums.finish()
        found = made[Statistic.DRIFT].halves.cpu()
        assert made[Statistic.DRIFT].outputs == alone
    assert torch.equal(found, expected.float())


# ---- others' checkpoints


@pytest.mark.parametrize("order", ["in order", "scattered", "no order"])
def test_columns_of_compressed_tensors_are_grouped_there(order):
    layout = CompressedTensorsLayout(PackQuantized(4, 32, True))
    stored = layout.encode(rtn.quantize(torch.randn(16, 128), AffineGrid(4, 32)))
    g_idx = torch.arange(128) // 32
    order = {"in order": g_idx, "scattered": g_idx.flip(0), "no order": torch.full((128,), -1)}[order]
    stored["weight_g_idx"] = order.int()
    wanted = layout.decode(stored).values()
    with present():
        found = layout.decode({name: tensor.to(NAME) for name, tensor in stored.items()}).values()
        assert found.device.type == torch.device(NAME).type and torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize(
    "name",
    ["4", *nightly("Q3_K", "nf4", "mxfp4", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "IQ4_NL", "IQ4_XS", "NVFP4")],
)
def test_what_is_replayed_is_what_runs_without(monkeypatch, name):
    """In the third call, too, with the sums that a graph has."""
    import launches

    grid = {"4": AffineGrid(4, 128), "nf4": Nf4Grid(), "mxfp4": MxFp4Grid()}.get(name) or named(name)
    with present(), torch.inference_mode():
        weight, statistics = launches.problem(256, 512, device=torch.device(NAME))
        grid, hessian = grid.together([weight]), statistics.hessian
        replayed = GptqSolver()
        found = [replayed.solve([weight], [grid], hessian)[0] for _ in range(3)][-1]
        monkeypatch.setattr(GptqSolver, "_replays", None)
        (plain,) = GptqSolver().solve([weight], [grid], hessian)
    assert_sums(found.error, plain.error, 1e-3 if REAL else 1e-6)
    same = (found.weight.codes == plain.weight.codes).float().mean().item()
    assert same > 0.99 if REAL else same == 1


@double_only
@pytest.mark.parametrize(
    "name",
    ["4", *nightly("nvfp4", "nf4", "fp8", "Q4_K", "3 asym", "nf4 single", "mxfp4", "int8", "Q6_K", "IQ4_XS")],
)
def test_what_is_replayed_waits_for_nothing(monkeypatch, name):
    """From the second call on, as a CUDA graph demands: nothing comes from the host, nothing is asked for."""
    grids = {
        "4": AffineGrid(4, 64), "3 asym": AffineGrid(3, 64, False), "int8": Int8Grid(256), "nf4": Nf4Grid(),
        "fp8": Float8Grid(256), "nf4 single": Nf4Grid(False), "mxfp4": MxFp4Grid(), "nvfp4": NvFp4Grid(),
    }  # fmt: skip
    import launches

    weight, statistics = launches.problem(24, 256, device=CPU)
    grid = (grids.get(name) or named(name)).together([weight])
    called = []

    def call(self, tensors, params, pool):
        before = DEVICE.syncs.total(), DEVICE.launches["from host"]
        found = plain(self, tensors, params, pool)
        if self.calls > 1:
            called.append((DEVICE.syncs.total(), DEVICE.launches["from host"]) == before)
        return found

    plain = replay._Replay.__call__
    monkeypatch.setattr(replay._Replay, "__call__", call)
    with present():
        solver = GptqSolver()
        for _ in range(2):
            solver.solve([weight.to("far")], [grid], statistics.hessian.to("far"))
    assert called and all(called)
