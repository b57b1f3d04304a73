"""Every command on a double of an accelerator (see far_device.py): it writes what the CPU writes."""

import json
from pathlib import Path

import far_device
import pytest
from far_device import DEVICE

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CALIBRATED = ["--samples", "4", "--seqlen", "32", "--batch-size", "2"]
SMALL = ["--group-size", "32"]


@pytest.fixture
def source(tiny_model) -> Path:
    return tiny_model("llama", tokenizer=True, **SIZES)


@pytest.fixture
def far(quantkit):
    """`far("gptq", ...)` runs a command on the double, and it must succeed."""

    def run(*arguments):
        with far_device.present():
            done = quantkit(*arguments, "--device", "far")
        assert done.code == 0, done.err
        assert DEVICE.launches, "nothing ran on the device"
        return done

    return run


@pytest.fixture
def both(far, quantkit, tmp_path):
    """`both("gptq", model)` runs a command on the CPU and on the double: both output folders."""

    def run(*arguments) -> tuple[Path, Path]:
        on_cpu, on_far = tmp_path / "on-cpu", tmp_path / "on-far"
        options = (*arguments, "--dtype", "float32", "-q")
        done = quantkit(*options, "-o", on_cpu, "--device", "cpu")
        assert done.code == 0, done.err
        far(*options, "-o", on_far)
        return on_cpu, on_far

    return run


def same_tensors(a: Path, b: Path) -> None:
    for name, path in ((path.name, path) for path in a.iterdir() if path.suffix in (".safetensors", ".gguf")):
        assert path.read_bytes() == (b / name).read_bytes(), name


METHODS = {
    "gptq": ["gptq", *SMALL, *CALIBRATED],
    "gptq full": ["gptq", *SMALL, *CALIBRATED, "--act-order", "full"],
    "gptq none": ["gptq", *SMALL, *CALIBRATED, "--act-order", "none"],
    "gptq 3 bit": ["gptq", *SMALL, *CALIBRATED, "--bits", "3", "--no-sym"],
    "gptq 2 bit v2": [
        "gptq",
        *SMALL,
        *CALIBRATED,
        "--bits",
        "2",
        "--no-sym",
        "--checkpoint-format",
        "gptq_v2",
    ],
    "gptq 8 bit": ["gptq", *SMALL, *CALIBRATED, "--bits", "8", "--no-mse"],
    "gptq ct": ["gptq", *SMALL, *CALIBRATED, "--layout", "compressed-tensors"],
    "gptq repeat": ["gptq", *SMALL, *CALIBRATED, "--sequential", "repeat"],
    "gptq rtn": ["gptq", *SMALL, "--solver", "rtn"],
    "nf4": ["nf4"],
    "nf4 single": ["nf4", "--no-double-quant"],
    "nf4 gptq": ["nf4", "--solver", "gptq", *CALIBRATED],
    "int8": ["int8"],
    "awq": ["awq", *SMALL, *CALIBRATED],
    "awq gptq": ["awq", *SMALL, *CALIBRATED, "--solver", "gptq"],
    "awq ct": ["awq", *SMALL, *CALIBRATED, "--layout", "compressed-tensors"],
}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_writes_the_bytes_of_the_cpu(both, source, method):
    name, *rest = METHODS[method]
    on_cpu, on_far = both(name, source, *rest)
    same_tensors(on_cpu, on_far)
    kept, manifest = (json.loads((folder / "quantkit.json").read_text()) for folder in (on_cpu, on_far))
    assert manifest["linears"] == kept["linears"]
    assert manifest["job"]["execution"]["device"] == "far"
