"""The Python API: every example of its page, and how it behaves in a process that goes on."""

import asyncio
import dataclasses
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jobs
import pytest
import torch
from sums import assert_sums

import quantkit
from quantkit.errors import USAGE, VERIFICATION, QuantkitError
from quantkit.evaluation.settings import EvalSettings
from quantkit.quantize.prepare import values

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
FAST = {"group_size": 32, "transform": "none", "refine": 0}
LIBRARIES = {"torch", "transformers", "numpy", "typer", "rich", "yaml", "huggingface_hub"}


class Stop(quantkit.Progress):
    """Interrupts after the first block, as Ctrl-C in a notebook does."""

    def block(self, index: int, replayed: bool) -> None:
        raise KeyboardInterrupt


def test_every_example_of_the_page_runs(tiny_model, tmp_path, monkeypatch, capsys):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    tiny_model("llama", name="model", tokenizer=True, **sizes)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    names = {"__name__": "notebook"}
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)):
        exec(compile(block, f"example {number}", "exec"), names)
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "model-w4 4." in printed.out and "| model-w4 | " in printed.out
    assert "block 1\nblock 2\n" in printed.out
    assert "gptq to awq with 14 equal linears\n" in printed.out
    assert "README.md names no base_model and no license | write `base_model: ORG/NAME` and" in printed.out
    assert str({"schema": "quantkit.job/3", "finished": True, "output": "./model-nf4"})[1:40] in printed.out
    assert "unknown keys: bitz | did you mean bits?" in printed.out


def test_options_that_are_texts_of_flags_take_numbers_and_lists():
    typed = {"max_kld": 0.5, "min_top1": 1, "metrics": ["ppl", "kld"], "limit": 7, "trials": ["nf4", "int8"]}
    found = values.filled(EvalSettings, typed, "evaluate")
    expected = {
        "max_kld": "0.5",
        "min_top1": "1",
        "metrics": "ppl,kld",
        "limit": 7,
        "trials": ("nf4", "int8"),
    }
    assert found == EvalSettings(**expected)
    assert values.filled(EvalSettings, {"dtype": "fp16"}, "evaluate").dtype == "float16"
    assert values.filled(EvalSettings, {"ctx": "4k"}, "evaluate").ctx == 4096
    for wrong in ({"max_kld": True}, {"metrics": [1]}, {"limit": "7"}):
        with pytest.raises(QuantkitError, match=f"evaluate: {next(iter(wrong))} is "):
            values.filled(EvalSettings, wrong, "evaluate")


def test_a_finished_file_has_its_summaries(tiny_model, tmp_path):
    source = tiny_model("llama", tokenizer=True, num_hidden_layers=1)
    options = {"type": ["Q8_0"], "solver": "rtn", "imatrix": "none", "transform": "none", "threads": 1}
    asked = {"output": tmp_path / "made.gguf", **options}
    made = quantkit.quantize("gguf", source, **asked)
    again = quantkit.quantize("gguf", source, resume=True, **asked)
    (expected,), (found,) = made.summaries, again.summaries
    assert dataclasses.replace(expected, seconds={}) == found and not made.finished
    assert again.record() == {"schema": "quantkit.job/3", "finished": True} | dataclasses.asdict(found)


def test_a_finished_folder_with_damaged_timings_is_one_error(tiny_model, tmp_path):
    source = tiny_model("llama", tokenizer=True, num_hidden_layers=1)
    quantkit.quantize("nf4", source, output=tmp_path / "out", threads=1, loss_tokens=0)
    for damaged in ("x", "[]", '{"seconds": 3, "steps_down": 4}'):
        (tmp_path / "out" / "quantkit-timings.json").write_text(damaged)
        with pytest.raises(QuantkitError, match="the manifest or the timings of .*out are damaged"):
            quantkit.quantize("nf4", source, output=tmp_path / "out", threads=1, resume=True)


def test_the_import_loads_no_library():
    code = "import sys, quantkit, json; dir(quantkit); print(json.dumps(list(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not LIBRARIES & set(loaded.split('"'))


def test_a_function_equals_the_command(make, tiny_model, tmp_path, monkeypatch, capsys):
    source = tiny_model("llama", tokenizer=True, num_hidden_layers=1)
    text = jobs.calibration(tmp_path)
    options = {"calibration": text.calibration, "samples": 6, "seqlen": 32, "threads": 1} | FAST
    typed = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", value)]
    printed = make("gptq", source, "-o", "typed", *typed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        called = quantkit.quantize("gptq", source, output=Path("called"), **options)
    assert (tmp_path / "called" / "quantkit.json").read_bytes() == (
        tmp_path / "typed" / "quantkit.json"
    ).read_bytes()
    same = ("seconds", "output")
    assert {key: value for key, value in printed.items() if key not in same} == {
        key: value for key, value in called.record().items() if key not in same
    }
    evaluated = make("eval", source, "called", "--text", text.calibration, "--ctx", 32)
    assert quantkit.evaluate([source, "called"], text.calibration, ctx=32).record == evaluated
    assert quantkit.inspect("called") == make("inspect", "called")
    assert quantkit.verify("called") == make("verify", "called")
    records = make("convert", "called", "--to", "awq"), quantkit.convert("called", "awq", output="other")
    assert records[0] | {"output": "other"} == records[1]
    assert (tmp_path / "called-awq" / "quantkit.json").read_bytes() == (
        tmp_path / "other" / "quantkit.json"
    ).read_bytes()
    assert quantkit.plan(source, gpu="rtx-3090") == make("plan", source, "--gpu", "rtx-3090")


def test_an_interrupted_call_continues_in_the_same_process(tiny_model, tmp_path):
    source, threads = tiny_model("llama"), torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        quantkit.quantize("nf4", source, output=tmp_path / "out", threads=threads + 1, progress=Stop())
    assert torch.get_num_threads() == threads
    assert not (tmp_path / "out").exists()
    with pytest.raises(QuantkitError, match="unfinished|resume|exists"):
        quantkit.quantize("nf4", source, output=tmp_path / "out", threads=threads + 1)
    made = quantkit.quantize("nf4", source, output=tmp_path / "out", threads=threads + 1, resume=True)
    whole = jobs.quantize("nf4", source, tmp_path / "whole")
    weights = [(place / "model.safetensors").read_bytes() for place in (made.output, tmp_path / "whole")]
    assert weights[0] == weights[1]
    assert_sums(made.summaries[0].error, whole.error)


def test_a_call_inside_a_running_event_loop(tiny_model, tmp_path):
    """Notebooks run cells in one."""

    async def cell():
        return quantkit.quantize("nf4", tiny_model("llama"), output=tmp_path / "out", progress=True)

    assert asyncio.run(cell()).output == tmp_path / "out"


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: quantkit.quantize("gptk", "m"), "no method 'gptk'"),
        (lambda: quantkit.quantize("gptq", "m", bits="4"), "gptq: bits is '4', not a whole number"),
        (lambda: quantkit.evaluate("m", context=4), "evaluate has unknown keys: context"),
        (lambda: quantkit.evaluate("m", max_kld=True), "evaluate: max_kld is True, not text"),
        (lambda: quantkit.plan("m", gpus=True), "plan: gpus is True, not a whole number"),
        (lambda: quantkit.plan(), "give either a model or --params"),
        (lambda: quantkit.auto("m"), "no budget is given"),
        (lambda: quantkit.convert("m", "exl2"), "--to exl2: no such layout"),
        (lambda: quantkit.push("m", "me"), "me is not the name of a repository"),
        (lambda: quantkit.auto("m", bpw=4, sample=1), "auto has unknown keys: sample"),
        (lambda: quantkit.evaluate([]), "evaluate has no model"),
        (lambda: quantkit.evaluate("m", ctx="4x"), "--ctx 4x is invalid"),
        (lambda: quantkit.verify("m", max_kld=1), "verify has unknown keys: max_kld"),
        (lambda: quantkit.verify("m", seed=4), "--calibration and --seed are for --reproduce"),
        (lambda: quantkit.quantize("gptq", "m", exclude="a"), "gptq: exclude is 'a', not a list of text"),
    ],
)
def test_wrong_options_raise_before_anything_is_read(call, message):
    with pytest.raises(QuantkitError) as caught:
        call()
    assert caught.value.message.startswith(message) and caught.value.exit_code == USAGE


def test_an_empty_text_is_not_the_shipped_one(tiny_model):
    with pytest.raises(QuantkitError, match="--text names no text"):
        quantkit.evaluate(tiny_model("llama", tokenizer=True), "")


def test_hints_name_what_the_call_accepts():
    with pytest.raises(QuantkitError) as caught:
        quantkit.auto("m", bwp=4)
    assert caught.value.hint.startswith("did you mean bpw? valid keys: bpw, max_size, ")
    with pytest.raises(QuantkitError) as caught:
        quantkit.quantize("gptq", "m", exclude="a")
    assert caught.value.hint.startswith("write ['a']. Keep linears in 16 bit")
    assert quantkit.plan(params=70e9)["parameters"] == quantkit.plan(params="70B")["parameters"]


def test_functions_are_listed_for_completion():
    assert set(quantkit.__all__) < set(dir(quantkit))


def test_a_damaged_checkpoint_raises_with_its_record(tiny_model, tmp_path):
    made = quantkit.quantize("nf4", tiny_model("llama"), output=tmp_path / "out")
    weights = made.output / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0\1")
    with pytest.raises(QuantkitError) as caught:
        quantkit.verify(made.output)
    assert caught.value.exit_code == VERIFICATION and caught.value.found["problems"]


def test_a_package_is_callable_and_stays_a_package():
    import quantkit.quantize.loop
    from quantkit.quantize import methods

    assert quantkit.quantize.methods is methods and quantkit.quantize.loop
    with pytest.raises(QuantkitError, match="no method 'none'"):
        quantkit.quantize("none", "m")
    with pytest.raises(AttributeError):
        _ = quantkit.nothing
    stub = (Path(quantkit.__file__).parent / "__init__.pyi").read_text()
    assert set(re.findall(r"(\w+) as \1", stub)) == set(quantkit.__all__)
