"""`--engine` of eval and verify: what an engine computes, and engines that compute something else.

transformers is the engine. `--python` may be any program: some of the tests replace transformers' loader. See
test_engine_processes.py for programs that are no engine.
"""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import families
import jobs
import jsonschema
import pytest
import torch
import transformers
from nights import nightly
from torch.nn.functional import cross_entropy

from quantkit.errors import QuantkitError
from quantkit.evaluation import evaluate, served, windows
from quantkit.evaluation.comparison import record as records
from quantkit.evaluation.comparison.gates import Gate, judge, refuse_failed
from quantkit.evaluation.comparison.table import markdown
from quantkit.models.files.open import open_checkpoint
from quantkit.quantize.progress import SILENT
from quantkit.serving.engines.choose import Offer
from quantkit.serving.server.command import ServerCommand
from quantkit.serving.server.job import Prepared, compare
from quantkit.serving.server.settings import ServeSettings
from quantkit.serving.server.sizing import ServerSize

FLOAT32 = ["--engine", "transformers", "--engine-option", "dtype=float32"]
TEXT = ["--ctx", 64, "--limit", 256]
TAMPERING = """#!{python}
import runpy, sys, torch, transformers
if sys.argv[1] == "-c":
    sys.exit(0)
loaded = transformers.AutoModelForCausalLM.from_pretrained
def tampered(*arguments, **options):
    model = loaded(*arguments, **options)
    with torch.no_grad():
        {tampering}
    return model
transformers.AutoModelForCausalLM.from_pretrained = tampered
program, sys.argv = sys.argv[3], sys.argv[3:]
sys.path.insert(0, program.rpartition("/")[0])
runpy.run_path(program, run_name="__main__")
"""
NAME = "model.layers.1.mlp.down_proj"


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(families.sentences()))
    return path


@pytest.fixture(scope="module")
def nf4(tmp_path_factory, short_demo) -> Path:
    """Two blocks of the demo model, as `quantkit nf4` writes them."""
    folder = tmp_path_factory.mktemp("made") / "nf4"
    jobs.quantize("nf4", short_demo, folder)
    return folder


@torch.no_grad()
def nll(folder: Path, ids: list) -> float:
    """By transformers alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = [cross_entropy(model(row[None]).logits[0, :-1], row[1:]) for row in torch.tensor(ids)]
    return torch.stack(losses).mean().item()


def test_an_engine_has_rows_of_its_own(short_demo, nf4, quantkit, text):
    """Over windows that overlap, of which it scores each token once, as the base's equal losses show."""
    command = ["eval", short_demo, nf4, "--text", text, *TEXT, "--stride", 24, *FLOAT32, "-q"]
    made = json.loads(quantkit(*command, "--max-kld", 1, "--json").out)
    schema = (Path(records.__file__).parent / "eval-3.json").read_text()
    jsonschema.validate(made, json.loads(schema))
    base, noise, decoded, served = made["models"]
    assert served["source"] == f"{nf4} in transformers"
    assert (base["engine"], decoded["engine"]) == (None, None)
    engine = served["engine"]
    assert engine["kernels"] == "bitsandbytes Linear4bit" and engine["version"] == transformers.__version__
    # the kernel computes in bfloat16 whatever is asked for
    assert served["metrics"]["nll"]["value"] == pytest.approx(decoded["metrics"]["nll"]["value"], abs=5e-3)
    assert 1e-7 < engine["difference"]["mean"] < decoded["metrics"]["kld"]["mean"] / 50
    assert noise["metrics"]["nll"]["value"] == pytest.approx(base["metrics"]["nll"]["value"], abs=1e-5)
    assert noise["engine"]["difference"] == noise["metrics"]["kld"]
    assert noise["metrics"]["kld"]["mean"] < 1e-9 and noise["engine"]["kernels"] == "torch Linear"
    names = [str(nf4), f"{nf4} in transformers"]
    assert [gate["model"] for gate in made["gates"]] == names
    assert made["pareto"]["models"] == [str(nf4), str(short_demo)]
    page = markdown(made)
    assert "from decode" in page
    assert f"nf4 in transformers: transformers {transformers.__version__}, bitsandbytes Linear4bit" in page
    verdicts = judge([Gate("", "kld.mean", "<=", 1e-6)], made["models"])
    with pytest.raises(QuantkitError, match="KL divergence of .*nf4 in transformers is"):
        refuse_failed(made | {"gates": verdicts})


@pytest.mark.parametrize("stride", nightly(24, 64))  # by day: above
def test_an_engine_computes_its_own_loss_over_windows_that_overlap(tiny_model, quantkit, text, stride):
    """Each token is scored once, in the first window that predicts it."""
    folder = tiny_model("llama", tokenizer=True)
    command = ["eval", folder, "--text", text, *TEXT, "--stride", stride, *FLOAT32, "--json", "-q"]
    made = json.loads(quantkit(*command).out)
    assert made["models"][1]["engine"]["difference"]["max"] < 1e-5
    if stride == 64:
        ids = windows.load(open_checkpoint(str(folder)), text, 64, None, 256).ids.tolist()
        served = made["models"][1]["metrics"]["nll"]["value"]
        assert served == pytest.approx(nll(folder, ids), abs=1e-5)


@pytest.mark.parametrize(
    "tampering",
    [
        f"model.get_submodule({NAME!r}).forward = lambda inputs: torch.zeros_like(inputs[..., :256])",
        *nightly(
            "model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))",
            f"model.get_submodule({NAME!r}).weight.quant_state.offset.zero_()",
        ),
    ],
    ids=["a linear that is skipped", "a head of random numbers", "scales of another type"],
)
def test_an_engine_that_computes_something_else_is_found(nf4, quantkit, program, tampering):
    python = program(TAMPERING.format(python=sys.executable, tampering=tampering))
    done = quantkit("verify", nf4, *FLOAT32, "--python", python, "--json", "-q")
    made = json.loads(done.out)
    assert done.code == 6 and not made["problems"]
    assert not made["engine"]["agrees"] and made["engine"]["difference"] > 4 * made["engine"]["bound"]
    assert made["error"]["message"].startswith(f"transformers does not compute what {nf4} holds")


@pytest.mark.nightly
def test_serve_refuses_what_computes_something_else(nf4, program):
    """The python beside the server's program runs the engine."""

    def prepared(python: Path) -> Prepared:
        command, size = ServerCommand((str(python),), "demo"), ServerSize(512, 1, None, 512, 0, 10**9, True)
        settings = ServeSettings(dtype="float32")
        return Prepared(str(nf4), Offer("transformers", True, ""), command, settings, size, False, ())

    assert compare(prepared(Path(sys.executable)), None, True, SILENT)["agrees"]
    tampering = f"model.get_submodule({NAME!r}).weight.quant_state.offset.zero_()"
    tampered = program(TAMPERING.format(python=sys.executable, tampering=tampering))
    with pytest.raises(QuantkitError, match="transformers does not compute what") as refused:
        compare(prepared(tampered), None, True, SILENT)
    assert refused.value.exit_code == 6


@pytest.mark.nightly
def test_codes_taken_for_weights_are_found(short_demo, tmp_path, quantkit):
    """transformers does not know ModelOpt's layout, and loads it without a word."""
    jobs.quantize("fp8", short_demo, tmp_path / "out", {"layout": "modelopt"})
    done = quantkit("verify", "out", "--engine", "transformers", "-q")
    assert done.code == 6 and "KL divergence" in done.out and "No damage" not in done.out


@pytest.mark.nightly
def test_the_original_says_how_large_the_noise_is(short_demo, nf4, make):
    made = make("verify", nf4, "--base", short_demo, "--engine", "transformers")["engine"]
    assert made["agrees"] and made["dtype"] == "bfloat16" and made["tokens"] == 255
    assert made["bound"] == pytest.approx(max(1e-4, 10 * max(made["arithmetic"], made["original"])))
    assert 0.3 < made["difference"] / made["arithmetic"] < 3


def test_damaged_files_are_not_run(nf4, tmp_path, quantkit):
    shutil.copytree(nf4, tmp_path / "out")
    with (tmp_path / "out/model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    done = quantkit("verify", "out", *FLOAT32, "--json", "-q")
    assert done.code == 6 and json.loads(done.out)["engine"] is None


def test_an_original_that_the_engine_does_not_read_is_no_error(tiny_model, make, quantkit, text):
    """llama.cpp reads files alone."""
    pytest.importorskip("xllamacpp")
    folder = tiny_model("llama", tokenizer=True)
    make("gguf", folder, "-o", "out.gguf", "--type", "F16")
    command = ["eval", folder, "out.gguf", "--text", text, *TEXT, "--engine", "llama.cpp"]
    made = json.loads(quantkit(*command, "--json", "-q").out)
    (declined,) = made["engine_declined"].items()
    assert declined[0] == str(folder)
    assert declined[1]["message"] == f"llama.cpp does not run {folder}: it reads GGUF files"
    decoded, served = made["models"][1:]
    assert served["metrics"]["nll"]["value"] == pytest.approx(decoded["metrics"]["nll"]["value"], abs=1e-3)
    assert 0 < served["engine"]["difference"]["max"] < 1e-4
    assert "llama was not measured in the engine: llama.cpp does not run" in markdown(made)


def test_a_file_is_verified_with_an_original_that_the_engine_does_not_read(tiny_model, make, quantkit):
    """The noise is then that of quantkit's decode alone."""
    pytest.importorskip("xllamacpp")
    folder = tiny_model("llama", tokenizer=True)
    make("gguf", folder, "-o", "out.gguf", "--type", "F16")
    done = quantkit("verify", "out.gguf", "--base", folder, "--engine", "llama.cpp", "--json", "-q")
    made = json.loads(done.out)["engine"]
    assert made["original"] is None and made["agrees"]


def test_llama_cpp_says_which_setting_it_does_not_have(tiny_model, make, refuse):
    pytest.importorskip("xllamacpp")
    make("gguf", tiny_model("llama", tokenizer=True), "-o", "out.gguf", "--type", "F16")
    error, _ = refuse(4, "verify", "out.gguf", "--engine", "llama.cpp", "--engine-option", "n_batches=8")
    assert error.startswith("llama.cpp does not run out.gguf: AttributeError: ") and "n_batches" in error


def test_flags_are_checked(demo_model, refuse, tmp_path):
    run = ["eval", demo_model, "--engine", "transformers"]
    assert refuse(2, *run, "--engine-option", "dtype")[0] == "--engine-option 'dtype' is not NAME=VALUE"
    none = tmp_path / "none"
    assert refuse(3, *run, "--python", none)[0] == f"--python {none}: no program that can run"
    assert refuse(3, *run, "--python", "")[0] == "--python is empty"
    error, hint = refuse(2, "eval", demo_model, "--task-limit", 3)
    assert (error, hint) == ("--task-limit needs --tasks", "add --tasks NAMES")
    for python in (sys.executable, ""):
        error, hint = refuse(2, "verify", demo_model, "--python", python)
        assert (error, hint) == ("--python and --engine-option need --engine", "add --engine NAME")


@pytest.mark.parametrize(("rounds_inputs", "agrees"), [(True, False), (False, True)])
def test_where_inputs_are_rounded_the_bound_is_narrower(monkeypatch, rounds_inputs, agrees):
    """vLLM's 8 bit products that overflow differ by 8.8 times the noise; honest kernels by 0.8 to 1.2."""
    facts = {"name": "vllm", "difference": {"mean": 0.0066}}
    monkeypatch.setattr(served, "_difference", lambda *_: (facts, 0.00075, 255))
    checkpoint = SimpleNamespace(layout=SimpleNamespace(rounds_inputs=rounds_inputs))
    assert served.check(None, [checkpoint], None)["agrees"] is agrees


@pytest.mark.parametrize(("method", "noisy"), [("fp8", True), ("nf4", False)])
def test_rounded_inputs_have_noise_in_float32_too(short_demo, tmp_path, monkeypatch, method, noisy):
    """A sum in another order rounds some inputs otherwise."""

    def in_engine(engine, decoded, text, base, chosen, listen):
        scores = evaluate._score(decoded.logits, text, 64, None, chosen)
        return scores, {"name": engine.name, "dtype": "float32", "difference": {"mean": 0.0}}

    monkeypatch.setattr(evaluate, "in_engine", in_engine)
    jobs.quantize(method, short_demo, tmp_path / "out")
    checkpoint = open_checkpoint(str(tmp_path / "out"))
    made = served.check(SimpleNamespace(name="vllm"), [checkpoint], lambda *_: None)
    assert (made["arithmetic"] > 1e-5) is noisy
    assert made["bound"] == pytest.approx(max(1e-4, 3 * made["arithmetic"]))
