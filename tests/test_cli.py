"""The command line from the outside: what it prints where, what it writes, and how it says no."""

import dataclasses
import io
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import families
import jobs
import pytest
import torch
import typer
import yaml
from nights import by_day, nightly
from safetensors.torch import load_file, save_file

from quantkit import cli
from quantkit.cli import commands, job_report
from quantkit.errors import QuantkitError
from quantkit.models.files.checkpoint import MANIFEST
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize import job, methods
from quantkit.quantize.methods.gptq import Options
from quantkit.quantize.prepare import plan
from quantkit.quantize.solvers.hessian import Indefinite
from quantkit.quantize.staging import folder as staging

LINEARS = {  # name inside a block -> shape, of the model that `model` makes
    "self_attn.q_proj": [128, 128],
    "self_attn.k_proj": [64, 128],
    "self_attn.v_proj": [64, 128],
    "self_attn.o_proj": [128, 128],
    "mlp.gate_proj": [128, 128],
    "mlp.up_proj": [128, 128],
    "mlp.down_proj": [128, 128],
}
NAMES = [f"model.layers.{block}.{local}" for block in (0, 1) for local in LINEARS]
GROUP = {name: commands.build(name) for name in typer.main.get_command(cli.app).commands}
RECIPE_COMMANDS = {f"recipes {name}": command for name, command in GROUP["recipes"].commands.items()}
COMMANDS = {name: command for name, command in GROUP.items() if name != "recipes"} | RECIPE_COMMANDS
RECIPES = Path(__file__).parents[1] / "recipes"
COLOUR = re.compile(r"\x1b\[(?:\d+;)*[349]\d")


@pytest.fixture
def model(tiny_model):
    """A Llama of two blocks whose linears take groups of 128."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    return tiny_model("llama", name="tiny", tokenizer=True, **sizes)


@pytest.fixture
def small(tmp_path):
    """Options that make a job small."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(families.sentences()))
    return ["--calibration", text, *"--samples 4 --seqlen 32 --batch-size 2 --threads 1".split()]


def nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


# ---- help, version, imports


def test_version_and_module(quantkit):
    from quantkit import __version__

    assert quantkit("--version") == (0, f"quantkit {__version__}\n", "")
    module = subprocess.run([sys.executable, "-m", "quantkit", "--version"], capture_output=True, text=True)
    assert (module.returncode, module.stdout, module.stderr) == (0, f"quantkit {__version__}\n", "")


@pytest.mark.parametrize("arguments", [["run", "-h"], *nightly((["eval", "-h"],), (["recipes", "--help"],))])
def test_help_imports_no_torch(arguments):
    command = [sys.executable, "-X", "importtime", "-m", "quantkit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "Usage" in done.stdout and {"quantkit", "typer"} <= imported
    assert not imported & {"torch", "transformers", "tokenizers", "safetensors", "numpy", "datasets"}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_option_and_has_examples(quantkit, name):
    flags = {flag for option in COMMANDS[name].params for flag in option.opts if flag.startswith("-")}
    done = quantkit(*name.split(), "--help-all" if "--help-all" in flags else "--help")
    assert flags <= set(re.findall(r"(?<=[\s│])--?[a-z0-9-]+\b", done.out))
    assert "<bool>" not in done.out
    assert all(option.help for option in COMMANDS[name].params)
    assert re.search(rf"Examples:\s+quantkit {name}\b", done.out)


def test_examples_in_the_help_can_be_pasted_into_a_shell():
    found = [cli.EPILOG, *(command.epilog or "" for command in (*GROUP.values(), *COMMANDS.values()))]
    lines = [line for text in found for line in text.splitlines() if line.startswith("  ")]
    assert len(lines) > 80 and any("  # " in line for line in lines)
    done = subprocess.run(["sh", "-n"], input="\n".join(lines), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["recipes", "recipes init", "report"])
def test_a_flag_without_value_has_no_type_in_the_help(quantkit, name):
    out = quantkit(*name.split(), "--help").out
    assert re.search(r"--help\s+-h\s+Show this message", out) and "<bool>" not in out


def test_help_shows_common_options_and_help_all_the_rest(quantkit):
    short, whole = quantkit("gptq", "--help").out, quantkit("gptq", "--help-all").out
    for shown in ("--bits", "--output", "--solver", "--head", "--push", "--max-memory", "--help-all"):
        assert shown in short and shown in whole
    for advanced in ("--damp", "--checkpoint-format", "--max-shard-gb", "--revision"):
        assert advanced not in short and advanced in whole


@pytest.mark.parametrize(
    ("command", "sections", "own"),
    [
        ("gptq", (Options, CalibrationOptions, RunOptions), {"--recipe"}),
        ("run", (CalibrationOptions, RunOptions), {"recipe", "--set"}),
    ],
)
def test_every_field_is_a_flag(command, sections, own):
    fields = {
        "--" + field.name.replace("_", "-") for section in sections for field in dataclasses.fields(section)
    }
    flags = {flag for option in COMMANDS[command].params for flag in option.opts}
    fixed = (
        "output dry-run resume overwrite eval push revision offline trust-remote-code json quiet verbose "
        "help-all"
    )
    assert flags == fields | own | {"model", "-o", "-q", "-v"} | {f"--{name}" for name in fixed.split()}


# ---- the plan


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ("", "tiny-gptq-w4g128"),
        ("--bits 3 --group-size 64 --no-sym", "tiny-gptq-w3g64-asym"),
        ("--group-size -1 --solver rtn", "tiny-rtn-w4channel"),
    ],
)
def test_the_output_is_named_after_model_and_options(make, model, small, options, name):
    assert make("gptq", model, *small, *options.split(), "--dry-run")["output"] == name


def test_the_name_of_the_folder_one_stands_in(make, model, small, monkeypatch):
    monkeypatch.chdir(model)
    assert make("gptq", ".", *small, "--dry-run")["output"] == "tiny-gptq-w4g128"


def test_a_folder_is_not_named_like_a_gguf_file(refuse, model):
    error, hint = refuse(2, "nf4", model, "-o", "out.gguf")
    assert error == "-o out.gguf is the name of a GGUF file, but nf4 writes a folder"
    assert "quantkit gguf" in hint


def test_dry_run_lists_every_linear_and_writes_nothing(quantkit, make, model, small, tmp_path):
    before = jobs.contents(tmp_path)
    record = make("gptq", model, *small, "--exclude", "1.*o_proj", "--dry-run")
    done = quantkit("gptq", model, *small, "--exclude", "1.*o_proj", "--dry-run")
    assert jobs.contents(tmp_path) == before
    grid = {"bits": 4, "group_size": 128, "symmetric": True, "zero_min": 1, "search": True}
    grid |= {"clip": False, "signed": True}
    kept = "model.layers.1.self_attn.o_proj"
    assert record["linears"] == [
        {
            "name": name,
            "shape": LINEARS[name.split(".", 3)[3]],
            "grid": None if name == kept else grid,
            "kept": "--exclude 1.*o_proj" if name == kept else None,
        }
        for name in NAMES
    ]
    rows = {line.split()[0]: line.split() for line in done.out.splitlines() if " × " in line}
    assert rows.keys() == LINEARS.keys()
    assert rows["mlp.down_proj"][1:] == "0-1 128 × 128 4 bit, whole rows".split()
    assert "16 bit (--exclude 1.*o_proj)" in done.out
    assert "float8 e4m3, whole rows" in quantkit("fp8", model, "--dry-run", "-q").out


def test_a_dry_run_says_the_time_that_plan_says(quantkit, make, model, small):
    def planned(method, samples=4, seqlen=32):
        made = make("plan", model, "--samples", samples, "--seqlen", seqlen, "--threads", 1)
        return made["job"][method]["seconds"]

    record = make("gptq", model, *small, "--dry-run")
    assert record["expected_seconds"] == planned("gptq") < planned("gptq", 4096, 512)
    assert make("nf4", model, "--threads", 1, "--dry-run")["expected_seconds"] == planned("nf4")
    done = quantkit("gptq", model, *small, "--bits", 3, "--dry-run")
    assert f"time         about {record['expected_seconds']:.0f} s, by a benchmark of this" in done.out
    assert make("gptq", model, *small, "--dtype", "bfloat16", "--dry-run")["expected_seconds"] > 0
    for option in ("--solver rtn", "--target own"):
        assert make("gptq", model, *small, *option.split(), "--dry-run")["expected_seconds"] is None
    done = quantkit("gguf", model, *small, *"-t Q4_0 -t Q8_0 --dry-run".split())
    assert "of this machine" not in done.out
    error = QuantkitError("plan does not read this", "a job does")
    with mock.patch("quantkit.capacity.source.read", side_effect=error):
        assert make("gptq", model, *small, "--dry-run")["expected_seconds"] is None


def test_the_plan_is_what_happens(make, model, small):
    # with fewer samples the output loses more than round to nearest, and warns
    options = [*small, "--samples", 16, "--bits", 3, "--group-size", 64]
    planned = make("gptq", model, *options, "--dry-run")["plan"]
    made = make("gptq", model, *options)
    source = load_file(model / "model.safetensors")
    written = load_file("tiny-gptq-w3g64/model.safetensors")
    assert planned["output_bytes"] == made["output_bytes"] == nbytes(written)
    assert planned["source_bytes"] == made["source_bytes"] == nbytes(source)
    packed = {name: tensor for name, tensor in written.items() if name not in source}
    weights = sum(source[f"{name}.weight"].numel() for name in NAMES)
    assert planned["bits_per_weight"] == made["bits_per_weight"] == 8 * nbytes(packed) / weights
    assert made["bits_per_weight_model"] == 8 * nbytes(written) / sum(t.numel() for t in source.values())
    assert planned["execution"] == {
        "dtype": "float32", "device": "cpu", "batch_size": 2, "sequential": "suspend", "threads": 1,
        "states": "device", "at_once": 1,
    }  # fmt: skip


# ---- a run


def test_a_larger_output_is_called_larger():
    made = SimpleNamespace(
        source_bytes=1.11e9, output_bytes=2.54e9, bits_per_weight=None, bits_per_weight_model=4.0
    )
    assert job_report._sizes(made, 1)["size"] == "1.11 GB → 2.54 GB (2.29× larger)"


def test_a_run_says_what_it_made(quantkit, model, small, tmp_path):
    done = quantkit("gptq", model, *small)
    folder = tmp_path / "tiny-gptq-w4g128"
    source, written = nbytes(load_file(model / "model.safetensors")), load_file(folder / "model.safetensors")
    bits = 8 * nbytes({k: t for k, t in written.items() if "proj." in k}) / (2 * 98304)
    facts = dict(re.findall(r"^(\S+(?: \S+)?) {2,}(.*)$", done.out, re.MULTILINE))
    assert done.code == 0
    assert facts["written"] == folder.name
    ratio = source / nbytes(written)
    assert facts["size"] == f"{source / 1e6:.2f} MB → {nbytes(written) / 1e6:.2f} MB ({ratio:.2f}× smaller)"
    assert facts["bits/weight"].startswith(f"{bits:.2f} in 14 quantized linears, ")
    assert "fallbacks" not in facts
    errors = re.findall(r"\d\.\d+", facts["error"])
    manifest = json.loads((folder / "quantkit.json").read_text())
    rows = manifest["linears"]
    assert [row["name"] for row in rows] == NAMES
    assert errors == [f"{sum(row[key] for row in rows) / 14:#.2g}" for key in ("error", "rtn_error")]
    assert done.out.endswith(f"\nnext: quantkit eval {model} {folder.name}\n")
    lines = done.err.splitlines()
    assert [line.split(" error")[0] for line in lines[-5:]] == [
        "block 1/2", "block 2/2", "writing the checkpoint", "measuring the loss: the original model",
        "verifying what was written",
    ]  # fmt: skip
    assert "\x1b" not in done.out + done.err
    assert [path.name for path in tmp_path.glob("*.partial")] == []


def test_json_is_alone_on_stdout(quantkit, model, small):
    done = quantkit("gptq", model, *small, "--json")
    record = json.loads(done.out)
    assert (record["schema"], record["linears"], record["kept"]) == ("quantkit.job/3", 14, 0)
    assert "block 2/2" in done.err
    stages = set("load original forward hessian solve pack write verify hash loss".split())
    assert record["seconds"].keys() == stages and all(value > 0 for value in record["seconds"].values())
    done = quantkit("eval", model, "tiny-gptq-w4g128", "--text", small[1], "--limit", 512, "--json")
    assert [row["source"] for row in json.loads(done.out)["models"]] == [str(model), "tiny-gptq-w4g128"]
    assert done.err == f"evaluated {model}\nevaluated {model} in bfloat16\nevaluated tiny-gptq-w4g128\n"


def test_quiet_says_nothing_on_stderr(quantkit, model, small):
    done = quantkit("gptq", model, *small, "-q")
    assert (done.code, done.err) == (0, "") and "written" in done.out
    done = quantkit("eval", model, "--text", small[1], "--limit", 512, "-q")
    assert (done.code, done.err) == (0, "") and "tiny" in done.out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_no_color_no_colour(quantkit, model, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert quantkit("nf4", model, "--overwrite").code == 0
    assert COLOUR.search(terminal.getvalue()) and "2/2" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert quantkit("nf4", model, "--overwrite").code == 0
    assert not COLOUR.search(terminal.getvalue()) and "2/2" in terminal.getvalue()


@pytest.mark.parametrize("quiet", [[], *nightly(["-q"])])
def test_fallbacks_are_announced_and_recorded(quantkit, model, small, monkeypatch, quiet):
    def factorize(hessian, damp, order):
        raise Indefinite("made to fail")

    for user in ("solvers.gptq", "calibrate.statistics"):
        monkeypatch.setattr(f"quantkit.quantize.{user}.factorize", factorize)
    done = quantkit("gptq", model, *small, *quiet)
    assert re.search("^fallbacks +14 linears", done.out, re.MULTILINE)
    manifest = json.loads(Path("tiny-gptq-w4g128/quantkit.json").read_text())
    assert [row["fallback"] for row in manifest["linears"]] == ["made to fail"] * 14
    for name in NAMES:
        assert f"  {name}: made to fail\n" in done.out
        assert f"warning: {name}: made to fail; kept round to nearest\n" in done.err


@pytest.mark.parametrize("solver", ["gptq", *nightly("rtn")])
@pytest.mark.parametrize("factor", [1e8, *nightly(1e-9)])
def test_scales_that_float16_cannot_hold_are_reported(quantkit, model, small, solver, factor):
    """Half of the weight is lost, or more: a checkpoint like that must not pass for a good one. To the target
    `original` a linear may add what repairs earlier errors, so tiny weights would not stay tiny."""
    name = "model.layers.0.mlp.down_proj"
    with jobs.edited(model) as tensors:
        tensors[f"{name}.weight"] *= factor
    done = quantkit("gptq", model, *small, "--solver", solver, "--target", "own")
    assert re.search(rf"^(warning|error): .*{re.escape(name)}.*float16", done.err, re.MULTILINE)


def test_the_next_command_can_be_pasted(quantkit, model, small):
    done = quantkit("gptq", model, *small, "-o", "my models/it's 4 bit", "--solver", "rtn")
    command = shlex.split(re.search("^next: (.*)$", done.out, re.MULTILINE)[1])
    assert command == ["quantkit", "eval", str(model), "my models/it's 4 bit"]


def test_the_next_command_without_a_tokenizer_compares_weights(quantkit, model):
    """`quantkit eval` needs a tokenizer."""
    shutil.copytree(model, "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    done = quantkit("nf4", "bare", "-o", "made")
    command = re.search("^next: (.*)$", done.out, re.MULTILINE)[1].split()
    assert command == ["quantkit", "inspect", "bare", "made"]
    assert "largest differences" in quantkit(*command[1:]).out


def test_eval_at_the_end_of_a_run(quantkit, make, model, small, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # one table
    text = Path("few.txt")
    text.write_text("\n".join(families.sentences(36)))
    done = quantkit("gptq", model, *small, "--eval", text)
    rows = {row[0]: row for line in done.out.splitlines() if (row := re.split(r"\s{2,}", line.strip()))}
    size, bits, quantized, perplexity, kld = 1, 2, 3, 4, 6
    assert rows["tiny"][bits] == "32.00" and rows["tiny"][quantized] == rows["tiny"][kld] == "–"
    record = make("eval", model, "tiny-gptq-w4g128", "--text", text)
    metrics = record["models"][1]["metrics"]
    result = rows["tiny-gptq-w4g128"]
    assert result[perplexity] == f"{metrics['ppl']['value']:.3f} ± {metrics['ppl']['stderr']:.3f}"
    assert result[kld] == f"{metrics['kld']['mean']:.5f}" != "0.00000"
    assert result[size] == f"{record['models'][1]['size']['weight_bytes'] / 1e6:.2f} MB"
    assert f"{record['data']['tokens']} tokens scored, context 256, stride 256, BOS none, float32" in done.out
    again = make("gptq", model, *small, "--overwrite", "--eval", text)
    for row in [*record["models"], *again["eval"]["models"]]:
        del row["size"]["disk_bytes"]  # the timings are not always as long
    assert again["eval"] == record
    assert record["models"][1]["size"]["bits_per_quantized_weight"] == again["bits_per_weight"]
    assert result[quantized] == f"{again['bits_per_weight']:.2f}"


@pytest.mark.parametrize(
    ("moment", "made", "said"),
    [
        ("quantize.job.prepare", False, "error: interrupted\nhint: begin again with: quantkit gptq "),
        (
            "evaluation.evaluate.evaluate",
            True,
            "error: interrupted; tiny-gptq-w4g128 finished\nhint: measure with: quantkit eval\n",
        ),
    ],
)
def test_an_interrupt_outside_the_loop(quantkit, model, small, monkeypatch, moment, made, said):
    """Before the loop there is nothing to resume, after it the result is there."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"quantkit.{moment}", interrupt)
    done = quantkit("gptq", model, *small, "--eval", small[1], "-q")
    assert (done.code, done.out) == (130, "") and done.err.startswith(said)
    assert Path("tiny-gptq-w4g128").exists() == made


# ---- what is kept


@pytest.mark.processor
def test_excluded_linears_keep_their_bytes(make, tiny_model, small, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    model = tiny_model("llama", name="tiny", tokenizer=True, dtype="bfloat16", **sizes)
    patterns = ["--exclude", r"layers\.0\.mlp", "--exclude", "o_proj$"]
    made = make("gptq", model, *small, *patterns)
    kept = [name for name in NAMES if "layers.0.mlp" in name or "o_proj" in name]
    assert (made["linears"], made["kept"]) == (9, 5)
    folder = tmp_path / "tiny-gptq-w4g128"
    source, written = load_file(model / "model.safetensors"), load_file(folder / "model.safetensors")
    same = [name for name in source if name in written]
    assert {f"{name}.weight" for name in kept} == {name for name in same if "proj" in name}
    for name in same:
        assert written[name].dtype == source[name].dtype == torch.bfloat16
        assert torch.equal(written[name].view(torch.int16), source[name].view(torch.int16))
    rows = {row["name"]: row for row in json.loads((folder / "quantkit.json").read_text())["linears"]}
    assert {name: row["kept"] for name, row in rows.items() if "kept" in row} == {
        name: r"--exclude layers\.0\.mlp" if "mlp" in name else "--exclude o_proj$" for name in kept
    }
    rules = json.loads((folder / "config.json").read_text())["quantization_config"]["dynamic"]
    assert all(rule.startswith("-:") and content == {} for rule, content in rules.items())
    matched = [name for name in NAMES if any(re.match(rule[2:], name) for rule in rules)]
    assert matched == kept


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["zzz", "q_proj", "yyy"], ["no linear matches", "--exclude zzz, --exclude yyy"]),
        (["q_proj", "(up"], ["'(up'", "not a regular expression"]),
        (["."], ["nothing to quantize"]),
    ],
)
def test_exclude_that_does_not_do_what_it_says(refuse, model, small, tmp_path, patterns, words):
    options = [word for pattern in patterns for word in ("--exclude", pattern)]
    error, _ = refuse(2, "gptq", model, *small, *options)
    assert all(word in error for word in words) and "q_proj" not in error
    assert not list(tmp_path.glob("tiny-*"))


# ---- recipes: what they mean is tested in test_recipe.py


@pytest.fixture
def mine(tmp_path):
    """Writes `mine.yaml`, a recipe of gptq with these lines."""

    def write(**content) -> str:
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"method": "gptq"} | content))
        return "mine.yaml"

    return write


RECIPES_BY_DAY = ("awq-w4", "fp8", "gguf-q4", "gptq-w4", "int8", "nf4", "nvfp4", "w8a8")  # one of a method


@pytest.mark.parametrize("name", by_day(sorted(path.stem for path in RECIPES.glob("*.yaml")), RECIPES_BY_DAY))
def test_shipped_recipes_run(make, model, small, name):
    path = RECIPES / f"{name}.yaml"
    content = yaml.safe_load(path.read_text())
    method = content["method"]
    named = make("run", path.stem, model, *small, "--dry-run")
    options = json.loads(json.dumps(dataclasses.asdict(methods.load(method).Options())))
    options |= {"group_size": 128} if "group_size" in options else {}
    assert (named["method"], named["options"]) == (method, options | content.get("quant", {}))
    assert named == make("run", path, model, *small, "--dry-run")
    assert named == make(method, model, *small, "--recipe", path.stem, "--dry-run")


def test_flags_win_over_the_recipe(make, model, small, mine):
    """Even where a flag says the default."""
    quant = {"bits": 8, "group_size": 64, "sym": False, "damp": 0.05}
    name = mine(quant=quant, calibration={"seqlen": 16, "seed": 7}, run={"exclude": ["o_proj"]})
    flags = ["--group-size", 128, "--sym", "--exclude", "down_proj", "--recipe", name, "--dry-run"]
    record = make("gptq", model, *small, *flags)
    options, calibration = record["options"], record["calibration"]
    assert (options["bits"], options["group_size"], options["sym"], options["damp"]) == (8, 128, True, 0.05)
    assert (calibration["seqlen"], calibration["seed"]) == (32, 7)
    assert {row["kept"] for row in record["linears"]} == {None, "--exclude down_proj"}


def test_a_recipe_makes_what_the_flags_make(make, model, small, mine, tmp_path):
    name = mine(model=str(model), output="one/out", quant={"group_size": 64})
    settings = ["--set", "quant.solver=rtn", "--set", "quant.bits=3"]
    made = make("run", name, *small, *settings)
    assert (made["output"], made["linears"]) == ("one/out", 14)
    make("gptq", model, *small, *"--group-size 64 --bits 3 --solver rtn -o two/out".split())
    assert jobs.contents(tmp_path / "one") == jobs.contents(tmp_path / "two")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("run gptq-w44 model", 3, ["gptq-w44", "did you mean gptq-w4?"]),
        ("recipes show gptq-w44", 3, ["gptq-w44", "did you mean gptq-w4?"]),
        ("run gptq-w4 model --set quant.bitz=3", 2, ["quant.bitz", "did you mean quant.bits?"]),
        ("run gptq-w4 model --set quant.bits=9", 2, ["--bits 9", "2 to 8"]),
        ("run gptq-w4 nowhere", 3, ["nowhere"]),
        (
            "recipes init auto",
            2,
            ["auto takes no recipe\nhint: it writes a recipe: quantkit auto MODEL --bpw 4"],
        ),
        ("recipes init gptqq", 2, ["gptqq", "did you mean gptq?"]),
        ("recipes init gptq -o nowhere/mine.yaml", 2, ["nowhere/mine.yaml", "another place"]),
    ],
)
def test_recipe_commands_say_no(quantkit, tmp_path, arguments, code, words):
    done = quantkit(*arguments.split())
    assert (done.code, done.out) == (code, "")
    assert re.fullmatch(r"error: \S.*\nhint: \S.*\n", done.err)
    assert all(word in done.err for word in words)
    assert list(tmp_path.iterdir()) == []


def test_recipes_are_listed_and_shown(quantkit):
    paths = sorted(RECIPES.glob("*.yaml"))
    contents = [yaml.safe_load(path.read_text()) for path in paths]
    rows = [{"name": path.stem} | content for path, content in zip(paths, contents, strict=True)]
    record = json.loads(quantkit("recipes", "list", "--json").out)
    assert record == {
        "schema": "quantkit.recipes/1",
        "recipes": [{key: row[key] for key in ("name", "method", "description")} for row in rows],
    }
    table = quantkit("recipes", "list").out
    for row in rows:
        assert re.search(rf"^ *{row['name']} +{row['method']} +{row['description'][:20]}", table, re.M)
    for path in paths:
        assert quantkit("recipes", "show", path.stem) == (0, path.read_text(), "")


@pytest.mark.parametrize("method", methods.available())
def test_init_writes_a_recipe_of_the_defaults(quantkit, make, model, small, tmp_path, method):
    done = quantkit("recipes", "init", method)
    next_line = f"next: quantkit run {method}.yaml MODEL --dry-run\n"
    assert done == (0, f"wrote {method}.yaml\n\n{next_line}", "")
    written = make("run", f"{method}.yaml", model, *small, "--dry-run")
    assert written == make(method, model, *small, "--dry-run")
    before = (tmp_path / f"{method}.yaml").read_bytes()
    done = quantkit("recipes", "init", method)
    assert (done.code, done.out) == (2, "") and f"{method}.yaml exists" in done.err
    assert (tmp_path / f"{method}.yaml").read_bytes() == before


# ---- options that cannot be


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--bits 9", "2 to 8"),
        ("--group-size 0", "group-size 0"),
        ("--damp nan", "between 0 and 1"),
        ("--refine -1", "refine -1"),
        ("--samples 0", "samples"),
        ("--seqlen 1", "seqlen"),
        ("--batch-size 0", "batch-size 0"),
        ("--threads 0", "threads 0"),
        ("--max-shard-gb 0", "max-shard-gb 0"),
        ("--max-shard-gb nan", "max-shard-gb nan"),
    ],
)
def test_values_no_job_can_have(refuse, model, small, tmp_path, option, words):
    said = " ".join(refuse(2, "gptq", model, *small, *option.split()))
    assert words in said
    assert not list(tmp_path.glob("tiny-*"))


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("gptq m --layout compressed-tensor", "did you mean compressed-tensors? see quantkit gptq --help"),
        ("gptq m out", "the output is an option: -o out; see quantkit gptq --help"),
        ("auto m --engine llamacpp", "did you mean llama.cpp? see quantkit auto --help"),
        ("gptq m --dtype flaot16", "did you mean float16? see quantkit gptq --help"),
        ("gptq m --solver gptqq", "did you mean gptq? choose one of gptq, yaqa, rtn"),
        ("auto m --bpw 4 --solver yqa", "did you mean yaqa? choose one of gptq, yaqa"),
        ("gptq m --device cdua", "did you mean cuda? choose auto, cpu, cuda, cuda:N or mps"),
        ("convert m --to compressed", "did you mean compressed-tensors? choose one of gptq, awq, "),
        ("eval m --as int", "did you mean int8? choose fp8 or int8 or nf4"),
        ("run gptq-w4 m --set quant.layout=mxl", "did you mean mlx? Layout on disk."),
        ("gptq m --bits 3.5", "for a mean of 3.5 bits, different in each linear: quantkit auto MODEL"),
        ("gptq m --bits=3.5", "for a mean of 3.5 bits, different in each linear: quantkit auto MODEL"),
        ("run gptq-w4 m --set bits=2.25", "for a mean of 2.25 bits, different in each linear: quantkit auto"),
        ("auto m --max-size 4", "write --max-size 4GB, or 4B for bytes"),
        ("gptq m --max-memory 6", "write --max-memory 6GB, or 6B for bytes"),
    ],
)
def test_a_wrong_choice_is_answered_with_the_nearest(
    refuse, tiny_model, monkeypatch, tmp_path, arguments, hint
):
    tiny_model("llama", name="m", tokenizer=True)
    monkeypatch.chdir(tmp_path)
    assert refuse(2, *arguments.split())[1].startswith(hint)


@pytest.mark.parametrize(
    "command", ["gptq m", "eval m m", "generate m -p x", "chat m", "sample m", "bench m"]
)
def test_types_are_read_by_their_short_names(command):
    name, *arguments = command.split()
    for short, full in {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "f16": "float16"}.items():
        context = COMMANDS[name].make_context(name, [*arguments, "--dtype", short])
        assert context.params["dtype"] == full


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("gptq model --layout magic", ["--layout", "magic", "gptq", "compressed-tensors"]),
        ("gptq model --bits four", ["--bits", "whole number"]),
        ("gptq model --dtype float8", ["--dtype", "float32", "bfloat16"]),
        ("gptq model --groupsize 64", ["--groupsize", "did you mean --group-size?", "gptq --help"]),
        ("gptq", ["missing argument", "model", "quantkit gptq --help"]),
        ("gptq model another", ["another"]),
        ("gptq model --bits", ["--bits", "requires an argument"]),
        ("gtpq model", ["'gtpq'", "'gptq'", "quantkit --help"]),
        ("recipes lst", ["'lst'", "'list'", "quantkit recipes --help"]),
        ("--bogus", ["--bogus"]),
    ],
)
def test_words_the_parser_refuses(quantkit, arguments, words):
    """In the form of every other error, not the parser's own."""
    done = quantkit(*arguments.split())
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(r"error: \S.*\nhint: .*see quantkit .*--help\n", done.err)
    assert all(word in done.err for word in words)


@pytest.mark.parametrize("arguments", [[], ["recipes"]])
def test_no_command_is_answered_with_help(quantkit, arguments):
    done = quantkit(*arguments)
    assert (done.code, done.err) == (2, "") and "Usage" in done.out


def test_a_group_size_that_does_not_divide_says_where(refuse, tiny_model, small, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 10}
    model = tiny_model("llama", name="tiny", tokenizer=True, **sizes)
    error, hint = refuse(2, "gptq", model, *small, "--group-size", 64)
    assert error == "160 columns do not split into groups of 64: mlp.down_proj in 10 blocks"
    assert [int(size) for size in re.findall(r"-?\d+(?=[,;])", hint)] == [32, 16, 8, -1]
    assert "--exclude" in hint
    _, hint = refuse(
        2, "nf4", tiny_model("llama", name="odd", tokenizer=True, **{**sizes, "hidden_size": 96})
    )
    assert hint == "keep these linears in 16 bit with --exclude"  # it has no --group-size
    assert not list(tmp_path.glob("tiny-*"))


# ---- places


def test_an_existing_output_stays_unless_overwritten(refuse, make, model, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("data")
    error, hint = refuse(2, "nf4", model, "-o", out)
    assert str(out) in error and "--overwrite" in hint
    error, hint = refuse(2, "nf4", model, "-o", out, "--overwrite")
    assert "contains other files, precious: it would be lost" in error and "another -o" in hint
    assert jobs.contents(out) == {"precious": b"data"}
    (out / "config.json").write_text("{}")  # an old checkpoint, but not that alone
    refuse(2, "nf4", model, "-o", out, "--overwrite")
    (out / "precious").unlink()
    make("nf4", model, "-o", out, "--overwrite")
    fresh = tmp_path / "fresh" / "out"  # the parent is made
    make("nf4", model, "-o", fresh)
    assert jobs.contents(out) == jobs.contents(fresh)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out", "tiny"]


@pytest.mark.parametrize("output", ["tiny", ".", "../{}"])
def test_the_source_is_never_the_output(refuse, model, small, tmp_path, output):
    """Replacing it, or a folder around it, would delete what the job read."""
    before = jobs.contents(tmp_path)
    error, hint = refuse(2, "gptq", "tiny", *small, "-o", output.format(tmp_path.name), "--overwrite")
    assert output.format(tmp_path.name) in error and "another -o" in hint
    assert jobs.contents(tmp_path) == before


def test_a_staged_job_is_not_lost_unasked(refuse, make, model, small, tmp_path):
    staged = tmp_path / "tiny-gptq-w4g128.partial"
    staged.mkdir()
    (staged / "block-00000.safetensors").write_bytes(b"hours of work")
    for mode in ("--resume", "--overwrite"):
        error, hint = refuse(2, "gptq", model, *small, mode)
        assert "is not an unfinished job" in error and "move it away" in hint
    (staged / "fingerprint.json").write_text('{"quantkit": "1", "source_sha256": null}')
    error, hint = refuse(2, "gptq", model, *small)
    assert staged.name in error and "--resume" in hint and "--overwrite" in hint
    assert jobs.contents(staged)["block-00000.safetensors"] == b"hours of work"
    make("gptq", model, *small, "--overwrite")
    assert not staged.exists()


@pytest.mark.parametrize("output", [".", "/", "text.txt", "text.txt/out"])
def test_outputs_that_cannot_be(refuse, model, small, tmp_path, output):
    before = jobs.contents(tmp_path)
    error, _ = refuse(2, "gptq", model, *small, "-o", output)
    assert (output.split("/")[0] or "/") in error
    assert jobs.contents(tmp_path) == before


# ---- damaged and unfit models


@pytest.mark.parametrize(
    ("name", "solver", "value"),
    [
        ("model.layers.1.self_attn.q_proj.weight", "gptq", math.nan),
        ("model.layers.1.self_attn.q_proj.weight", "rtn", math.inf),
        ("model.layers.1.input_layernorm.weight", "gptq", math.inf),
        ("model.embed_tokens.weight", "gptq", math.nan),
        ("model.norm.weight", "rtn", math.nan),
        ("lm_head.weight", "rtn", math.inf),
    ],
)
def test_weights_that_are_not_finite_are_named(refuse, model, small, tmp_path, name, solver, value):
    with jobs.edited(model) as tensors:
        tensors[name][3] = value
    error, hint = refuse(1, "gptq", model, *small, "--solver", solver)
    assert name.removesuffix(".weight") in error and "damaged" in hint
    assert not (tmp_path / f"tiny-{solver}-w4g128").exists()


@pytest.mark.parametrize(
    ("dtype", "name", "factor", "linear"),
    [
        ("float16", "model.layers.1.mlp.up_proj.weight", 2e5, "model.layers.1.mlp.down_proj"),
        ("float32", "model.layers.0.input_layernorm.weight", 1e25, "model.layers.0.self_attn.q_proj"),
    ],
)
def test_activations_that_overflow_are_named(refuse, model, small, tmp_path, dtype, name, factor, linear):
    with jobs.edited(model) as tensors:
        tensors[name] *= factor
    error, hint = refuse(1, "gptq", model, *small, "--dtype", dtype)
    assert error == f"activations entering {linear} are not finite in {dtype}"
    assert "--dtype float32" in hint
    assert not (tmp_path / "tiny-gptq-w4g128").exists()


def test_a_quantized_model_is_not_quantized_again(make, refuse, model, small):
    make("gptq", model, *small, "--solver", "rtn", "-o", "once")
    error, hint = refuse(4, "gptq", "once", *small)
    assert error == "once is quantized already" and "original" in hint


def test_too_little_text_is_a_warning_even_when_quiet(quantkit, model, small):
    done = quantkit("gptq", model, *small, "--samples", 100000, "--dry-run", "-q")
    warning = r"warning: calibration text text.txt holds [\d,]+ tokens; .*: using \d+ sequences?\n"
    assert done.code == 0 and re.fullmatch(warning, done.err)


def test_a_text_that_a_job_does_not_read_is_said(quantkit, model, small):
    text = small[1]
    done = quantkit("nf4", model, *small[:2], "--dry-run")
    assert f"not reading {text}: with these options nf4 needs no text" in done.err
    assert f"calibration  none needed: {text} is not read" in " ".join(done.out.splitlines())
    assert "not read" not in "".join(quantkit("gptq", model, *small, "--dry-run")[1:])


# ---- resources


def test_a_disk_that_is_too_small(refuse, make, model, small, tmp_path, monkeypatch):
    need = make("gptq", model, *small, "--dry-run")["plan"]["disk_bytes"]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, need - 1))
    error, hint = refuse(5, "gptq", model, *small)
    assert "of disk" in error and "another -o" in hint
    assert not list(tmp_path.glob("tiny-*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, need))
    make("gptq", model, *small)


def test_the_predicted_disk_is_what_a_run_takes(make, model, small, tmp_path, monkeypatch):
    seen = []
    publish = staging.Staging.publish

    def measure(self):
        seen.extend(path for path in self.folder.rglob("*.safetensors"))
        seen[:] = [nbytes(load_file(path)) for path in seen]
        publish(self)

    monkeypatch.setattr(staging.Staging, "publish", measure)
    need = make("gptq", model, *small, "--dry-run")["plan"]["disk_bytes"]
    make("gptq", model, *small)
    assert len(seen) == 3 and sum(seen) == need


def test_memory_decides_the_mode_and_is_refused_when_short(make, refuse, model, small, tmp_path, monkeypatch):
    small = [*small, "--samples", 8, "--seqlen", 64, "--batch-size", 1, "--loss-tokens", 0]

    def need(mode: str, states: str = "auto") -> int:
        asked = "--sequential", mode, "--states", states
        return make("gptq", model, *small, *asked, "--dry-run")["plan"]["memory_bytes"]

    def chosen(free: int) -> tuple[str, str, int]:
        monkeypatch.setattr(plan, "free_memory", lambda device: free)
        record = make("gptq", model, *small, "--dry-run")["plan"]
        how = record["execution"]
        return how["sequential"], how["states"], record["memory_bytes"]

    suspend, repeat, disk = need("suspend"), need("repeat"), need("repeat", "disk")
    assert disk < repeat < suspend
    assert chosen(2 * suspend) == ("suspend", "device", suspend)
    assert chosen(int(repeat / 0.8) + 1) == ("repeat", "device", repeat)
    assert chosen(disk) == ("repeat", "disk", disk)
    error, hint = refuse(5, "gptq", model, *small, "--sequential", "suspend")
    assert "of memory" in error and hint.startswith("use --sequential repeat, with which the job needs ")
    monkeypatch.setattr(plan, "free_memory", lambda device: disk - 1)
    error, hint = refuse(5, "gptq", model, *small)
    assert hint.startswith("use --samples 4, with which the job needs ")
    assert not list(tmp_path.glob("tiny-*"))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.scales",
        *nightly(
            "model.norm.weight",
            "model.layers.0.self_attn.q_proj.qweight",
            "model.layers.1.mlp.down_proj.g_idx",
        ),
        *nightly("model.layers.1.input_layernorm.weight", "lm_head.weight"),
    ],
)
def test_what_reads_back_otherwise_is_not_published(make, refuse, model, small, tmp_path, monkeypatch, name):
    assemble = staging.Staging.assemble

    @contextmanager
    def corrupt(self):
        with assemble(self) as folder:
            yield folder
            with jobs.edited(folder) as tensors:
                tensors[name] = tensors[name].flip(0)

    options = ["gptq", model, *small, "--group-size", 64, "-o", "out"]
    with monkeypatch.context() as patch:
        patch.setattr(staging.Staging, "assemble", corrupt)
        error, hint = refuse(6, *options)
    assert "differ" in error and "--resume" in hint
    assert not (tmp_path / "out").exists()
    make(*options, "--resume")
    assert (tmp_path / "out" / MANIFEST).is_file() and not (tmp_path / "out.partial").exists()


def test_a_folder_without_tokenizer_is_called_that(refuse, model, small, tmp_path):
    shutil.copytree(model, bare := tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    error, hint = refuse(3, "gptq", bare, *small)
    assert error == f"{bare} has no tokenizer that loads: there are no files of one"
    assert "tokenizer.json" in hint
    (bare / "tokenizer.json").write_text("{")
    assert "there are no files" not in refuse(3, "gptq", bare, *small)[0]


def test_a_finished_job_has_nothing_to_resume(quantkit, refuse, model, tmp_path):
    """The same command says so; one with other options is told which, or that something else is there."""
    asked = ("nf4", model, "-o", "out")
    assert quantkit(*asked, "-q").code == 0
    before = jobs.contents(tmp_path / "out")
    done = quantkit(*asked, "--resume", "-q")
    assert (done.code, done.out, done.err) == (0, "out is already finished\n", "")
    assert quantkit(*asked, "--resume", "--dry-run", "-q") == done
    told = json.loads(quantkit(*asked, "--resume", "--json", "-q").out)
    assert told == {"schema": "quantkit.job/3", "output": "out", "finished": True}
    for other, different in (
        (("--no-double-quant",), "--double-quant (yes there, no here)"),
        (("--exclude", "q_proj"), "--exclude (none there, q_proj here)"),
    ):
        error, hint = refuse(2, *asked, *other, "--resume")
        assert error == f"out is the finished output of another job; different: {different}"
        assert hint == "choose another -o, or replace out with --overwrite"
    refuse(2, *asked)
    (tmp_path / "things").mkdir()
    assert refuse(2, "nf4", model, "-o", "things", "--resume")[0] == "things exists"
    file = ("gguf", model, "-t", "Q8_0", "--solver", "rtn", "--imatrix", "none", "-o", "out.gguf")
    assert quantkit(*file, "-q").code == 0
    assert quantkit(*file, "--resume", "-q").out == "out.gguf is already finished\n"
    assert jobs.contents(tmp_path / "out") == before


def test_a_finished_job_is_told_from_one_of_other_text_or_files(quantkit, refuse, model, small, tmp_path):
    """A text that holds less than was asked for makes the same job again; another text another one."""
    shutil.copytree(model, source := tmp_path / "source")
    (tmp_path / "other.txt").write_text("\n".join(families.sentences(seed=1)))
    text = "\n".join(families.sentences())
    few = len(text) // 40
    (tmp_path / "short.txt").write_text(text[:few])
    run = ("--seqlen", 32, "--threads", 1, "-o", "out")
    asked = ("gptq", source, "--group-size", 64, *run, "--calibration")
    assert quantkit(*asked, "short.txt", "--dtype", "float32", "-q").code == 0
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    samples = manifest["job"]["calibration"]["samples"]
    assert 1 < samples < 128
    for more in ((), ("--samples", samples), ("--samples", 64), ("--dtype", "float32"), ("--device", "cpu")):
        done = quantkit(*asked, "short.txt", *more, "--resume", "-q")
        assert (done.code, done.out) == (0, "out is already finished\n"), done.err
    for other, different in (
        (("other.txt",), "--calibration (short.txt there, other.txt here)"),
        (("short.txt", "--samples", 1), f"--samples ({samples} there, 1 here)"),
        (("short.txt", "--seqlen", 16), "--seqlen (32 there, 16 here)"),
        (("short.txt", "--seed", 1), "--seed (0 there, 1 here)"),
        (("short.txt", "--dtype", "bfloat16"), "--dtype (float32 there, bfloat16 here)"),
        (("short.txt", "--batch-size", 1), f"--batch-size ({samples} there, 1 here)"),
        (("short.txt", "--max-shard-gb", 1), "--max-shard-gb (none there, 1.0 here)"),
    ):
        error, hint = refuse(2, *asked, *other, "--resume")
        assert error.startswith("out is the finished output of another job; different: ")
        assert different in error
    assert refuse(3, *asked, "absent.txt", "--resume")[0].startswith("calibration text absent.txt")
    (tmp_path / "short.txt").write_text(text[-few:])
    assert "calibration tokens (" in refuse(2, *asked, "short.txt", "--resume")[0]
    (tmp_path / "short.txt").write_text(text[:few])
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config))  # other bytes
    assert "different: files of the model (" in refuse(2, *asked, "short.txt", "--resume")[0]


@pytest.mark.parametrize("job", [5, *nightly(None, {"calibration": 5}, {"execution": []})])
def test_a_manifest_that_is_none_is_not_resumed(quantkit, refuse, model, tmp_path, job):
    asked = ("nf4", model, "-o", "out")
    assert quantkit(*asked, "-q").code == 0
    path = tmp_path / "out" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"job": job}))
    error, hint = refuse(4, *asked, "--resume")
    assert error.startswith(f"{MANIFEST} of out: $.job")
    assert hint == "replace out with --overwrite"


def test_outputs_of_mixed_bits_have_names_of_their_own(quantkit, model, small, tmp_path):
    """A recipe as `auto` writes it does not take the name of `gptq --bits 3`."""
    recipe = {"method": "gptq", "model": str(model), "quant": {"bits": 3, "group_size": 64, "sym": False}}
    overrides = [r"layers\.0\..*q_proj$=4,64", r"layers\.1\..*down_proj$=2,32"]
    for name, lines in (("best", overrides), ("even", [r"layers\.0\.=3,32"])):
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(recipe | {"run": {"override": lines}}))
    for name, ending in (("best", "mixed-asym"), ("even", "w3g64-asym")):
        done = quantkit("run", f"{name}.yaml", *small, "--dry-run", "--json", "-q")
        assert done.code == 0, done.err
        assert Path(json.loads(done.out)["output"]).name == f"{model.name}-gptq-{ending}"


def test_several_types_read_the_text_once(quantkit, model, tmp_path):
    text = jobs.calibration(tmp_path).calibration
    flags = ("--calibration", text, "--samples", 4, "--seqlen", 32, "--loss-tokens", 0)
    both = quantkit("gguf", model, "-t", "Q4_0", "-t", "Q5_0", *flags, "-o", "both")
    assert both.code == 0 and both.err.count("reading the calibration text") == 1
    assert quantkit("gguf", model, "-t", "Q5_0", *flags, "-o", "one.gguf").code == 0
    assert (tmp_path / "both" / "tiny-Q5_0.gguf").read_bytes() == (tmp_path / "one.gguf").read_bytes()


def test_files_that_exist_are_all_named_and_the_others_made_by_resume(
    quantkit, refuse, model, tmp_path, monkeypatch
):
    asked = ("gguf", model, *("-t", "F16", "-t", "Q8_0", "-t", "BF16"), "--solver", "rtn", "-o", "files")
    (tmp_path / "files").mkdir()
    names = [f"files/tiny-{kind}.gguf" for kind in ("F16", "Q8_0", "BF16")]
    for kind in ("Q8_0", "BF16"):
        one = quantkit("gguf", model, "-t", kind, "--solver", "rtn", "-o", f"files/tiny-{kind}.gguf", "-q")
        assert one.code == 0
    before = jobs.contents(tmp_path / "files")
    with monkeypatch.context() as patch:
        patch.setattr(job, "prepare", None)  # nothing is done before
        error, hint = refuse(2, *asked)
    assert error == f"{names[1]}, {names[2]} exist"
    assert hint == (
        "choose another -o, or replace them with --overwrite; --resume makes only those that are left"
    )
    planned = quantkit(*asked, "--dry-run", "-q").out
    assert planned.count("refused") == 2 and f"{names[1]} exists" in " ".join(planned.split())
    done = quantkit(*asked, "--resume", "--json", "-q")
    assert (done.code, json.loads(done.out)["output"]) == (0, names[0])
    after = jobs.contents(tmp_path / "files")
    assert len(after) == 6 and {name: after[name] for name in before} == before
    assert quantkit(*asked, "--resume", "-q").out.splitlines() == [
        f"{name} is already finished" for name in names
    ]
    told = json.loads(quantkit(*asked, "--resume", "--json", "-q").out)
    assert [row["output"] for row in told["jobs"]] == names
    error, hint = refuse(2, *asked, "--exclude", "q_proj", "--resume")
    assert error.startswith(f"{names[0]} is the finished output of another job; different: --exclude")


def test_a_plan_says_what_becomes_of_an_output_that_exists(quantkit, model):
    asked = ("nf4", model, "-o", "out")
    assert not re.search("^(refused|replaces)", quantkit(*asked, "--dry-run", "-q").out, re.MULTILINE)
    assert quantkit(*asked, "-q").code == 0
    planned = quantkit(*asked, "--dry-run", "-q")
    line = "refused out exists: choose another -o, or replace it with --overwrite "
    assert planned.code == 0 and " ".join(planned.out.split()).startswith(line)
    refused = json.loads(quantkit(*asked, "--dry-run", "--json", "-q").out)["refused"]
    assert refused["message"] == "out exists"
    assert json.loads(quantkit(*asked, "--overwrite", "--dry-run", "--json", "-q").out)["refused"] is None
    replaced = quantkit(*asked, "--overwrite", "--dry-run", "-q").out
    assert "replaces the existing output " in " ".join(replaced.split()) and "refused" not in replaced
    Path("out.partial").mkdir()
    Path("out.partial/fingerprint.json").write_text('{"quantkit": "0", "source_sha256": null}')
    Path("out").rename("elsewhere")
    assert "refused" not in quantkit(*asked, "--dry-run", "-q").out  # of a job killed in its first block
    Path("out.partial/block-00000.safetensors").touch()
    planned = quantkit(*asked, "--dry-run", "-q").out
    assert "out.partial holds an unfinished job: continue it with --resume" in " ".join(planned.split())
    assert "refused" not in quantkit(*asked, "--resume", "--dry-run", "-q").out


def test_a_text_to_measure_on_is_looked_for_first(refuse, tmp_path):
    """Before the model, even."""
    error, hint = refuse(3, "nf4", "nowhere", "--eval", "nothing.txt")
    assert error == "text nothing.txt cannot be read: no such file" and "--eval" in hint


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("--threds", "did you mean --threads? "), ("--group", "did you mean --group-size? "), ("--cover", "")],
)
def test_only_what_is_close_is_suggested(refuse, typed, hint):
    assert refuse(2, "gptq", "model", typed)[1] == f"{hint}see quantkit gptq --help"


# ---- unusual outputs, models and options


def test_a_tilde_in_an_output_is_the_home_folder(make, model, tmp_path, monkeypatch):
    """A shell leaves the one in `--output=~/x`, and a recipe may hold one."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "mine.yaml").write_text("method: nf4\noutput: ~/second\n")
    make("nf4", model, "--output=~/first")
    make("run", "mine.yaml", model)
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["first", "second"]
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("command", ["gptq", "awq"])
def test_an_incomplete_checkpoint_is_refused_by_name(quantkit, small, model, command):
    lacking = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(file := model / "model.safetensors")
    save_file({name: part for name, part in tensors.items() if name != lacking}, file, {"format": "pt"})
    done = quantkit(command, model, *small)
    assert done.err.startswith(f"error: the checkpoint lacks 1 tensor of the model: {lacking}\nhint: ")


def test_the_recipe_of_a_card_repeats_a_job_with_undivided_linears(quantkit, tiny_model, small, tmp_path):
    source = tiny_model("llama", tokenizer=True, hidden_size=64, intermediate_size=168)
    assert quantkit("gptq", source, *small, "-o", "first").code == 0
    card = (tmp_path / "first" / "README.md").read_text()
    (tmp_path / "again.yaml").write_text(card.split("```yaml")[1].split("```")[0])
    done = quantkit("run", "again.yaml", source, "-o", "second", "--threads", 1)
    assert done.code == 0 and "does not divide 168 columns: mlp.down_proj" in done.err
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert {name: part.shape for name, part in one.items()} == {
        name: part.shape for name, part in two.items()
    }


def test_experts_of_whole_rows_are_quantized_alike(quantkit, tiny_model):
    """Their linears differ in columns, and so in the size of the one group of a row."""
    source = tiny_model("mixtral", tokenizer=True)
    assert "quantized differently" not in quantkit("fp8", source, "-o", "out").err


def test_every_file_of_an_own_output_may_be_replaced(make, model):
    for _ in range(2):
        make("fp4", model, *"--layout modelopt --solver rtn -o out --overwrite".split())


def test_a_tied_embedding_is_rounded_by_a_method_without_feedback(make, model, small):
    made = make("awq", model, *small, *"--layout mlx --embedding 4 -o out".split())
    assert made["linears"] == 15


def test_a_head_of_5_bits_is_warned_of(quantkit, tiny_model, small):
    source = tiny_model("llama", tokenizer=True, tie_word_embeddings=False)
    done = quantkit("gptq", source, *small, *"--head 5 --group-size 32 --dry-run".split())
    assert done.code == 0 and "GPTQModel alone" in done.err


@pytest.mark.parametrize("flag", ["--limit 9", "--ctx 9", "--batch 2"])
def test_auto_refuses_options_without_effect(quantkit, model, flag):
    done = quantkit("auto", model, "--bpw", "4", *flag.split())
    assert done.code == 2 and done.err.startswith(f"error: {flag.split()[0]} is for --")


def test_eval_says_what_has_no_effect(quantkit, model):
    done = quantkit("eval", model, "--weights-only", "--limit", 64, "--ctx", 32)
    assert done.code == 0 and "--weights-only: no model quantizes activations" in done.err
    done = quantkit("eval", model, "--text", "")
    assert (done.code, done.err.splitlines()[0]) == (2, "error: --text names no text")
