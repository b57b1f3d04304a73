"""Every command on a double of an accelerator (see far_device.py): it writes what the CPU writes."""

import json
from pathlib import Path

import families
import far_device
import numpy as np
import pytest
from far_device import DEVICE

from quantkit.containers.gguf_file import read_header
from quantkit.llamacpp.file_types import FILE_TYPES

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CALIBRATED = ["--samples", "4", "--seqlen", "32", "--batch-size", "2"]
SMALL = ["--group-size", "32"]


@pytest.fixture
def source(tiny_model) -> Path:
    return tiny_model("llama", tokenizer=True, **SIZES)


@pytest.fixture
def far(quantkit):
    """`far("gptq", ..., limit=2**20)` runs a command on the double; keywords set what the device can do."""

    def run(*arguments, code: int = 0, **device):
        with far_device.present():
            for name, value in ({"strict_products": True} | device).items():
                setattr(DEVICE, name, value)
            done = quantkit(*arguments, "--device", "far")
        assert done.code == code, done.err
        assert DEVICE.launches, "nothing ran on the device"
        return done

    return run


@pytest.fixture
def both(far, quantkit, tmp_path):
    """`both("gptq", model)` runs a command on the CPU and on the double: both output folders."""

    def run(*arguments, **device) -> tuple[Path, Path]:
        on_cpu, on_far = tmp_path / "on-cpu", tmp_path / "on-far"
        options = (*arguments, "--dtype", "float32", "-q")
        done = quantkit(*options, "-o", on_cpu, "--device", "cpu")
        assert done.code == 0, done.err
        far(*options, "-o", on_far, **device)
        return on_cpu, on_far

    return run


def same_tensors(a: Path, b: Path) -> None:
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


def same_file(a: Path, b: Path) -> None:
    """The same tensors in two GGUF files, whose metadata name the device that made them."""
    (_, left), (_, right) = read_header(a), read_header(b)
    assert list(left) == list(right)
    for name, info in left.items():
        found = [
            np.fromfile(p, np.uint8, i.nbytes, offset=i.offset) for p, i in ((a, info), (b, right[name]))
        ]
        assert np.array_equal(*found), f"{name} of {a.name}"


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


GGUF = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.fixture
def blocks_of_256(tiny_model) -> Path:
    return tiny_model("llama", tokenizer=True, **GGUF)


@pytest.mark.parametrize("imatrix", [["--imatrix", "none"], CALIBRATED])
@pytest.mark.parametrize("exact", ["--exact", "--no-exact"])
def test_every_gguf_type_has_the_bytes_of_the_cpu(far, quantkit, blocks_of_256, tmp_path, exact, imatrix):
    asked = ["gguf", blocks_of_256, "--solver", "rtn", exact, *imatrix, "--dtype", "float32", "-q"]
    for name in FILE_TYPES:
        asked += ["-t", name]
    on_cpu, on_far = tmp_path / "cpu", tmp_path / "far"
    assert quantkit(*asked, "-o", on_cpu, "--device", "cpu").code == 0
    far(*asked, "-o", on_far)
    assert len(list(on_cpu.iterdir())) == len(FILE_TYPES)
    for path in on_cpu.iterdir():
        same_file(path, on_far / path.name)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K_M", "Q4_K_M", "Q6_K", "IQ4_XS", "IQ4_NL", "Q4_0", "Q8_0"])
def test_error_feedback_on_ggml_blocks_has_the_bytes_of_the_cpu(both, blocks_of_256, name):
    same_file(*both("gguf", blocks_of_256, "-t", name, *CALIBRATED))


def test_an_importance_matrix_is_that_of_the_cpu(both, blocks_of_256):
    on_cpu, on_far = both("imatrix", blocks_of_256, *CALIBRATED)
    assert on_cpu.read_bytes() == on_far.read_bytes()


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


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(families.sentences(60, seed=1)))
    return path


@pytest.mark.parametrize(
    "method", ["gptq full", "gptq 3 bit", "gptq ct", "nf4", "nf4 single", "int8", "awq", "awq ct", "gguf"]
)
def test_eval_of_every_layout(far, make, source, blocks_of_256, text, method):
    made = "made.gguf" if method == "gguf" else "made"
    if method == "gguf":
        source, command = blocks_of_256, ["gguf", "-t", "Q4_K_M", "--solver", "rtn", "--imatrix", "none"]
    else:
        command = METHODS[method]
    make(command[0], source, *command[1:], "-o", made)
    asked = ["eval", source, made, "--text", text, "--ctx", 32, "--limit", 640]
    close(json.loads(far(*asked, "--json", "-q").out), make(*asked))


def test_eval_of_methods_that_are_tried(far, make, source, text):
    asked = ["eval", source, "--as", "nf4", "--as", "int8", "--text", text, "--ctx", 32, "--limit", 640]
    close(json.loads(far(*asked, "--json", "-q").out), make(*asked))


def test_eval_with_tasks(far, make, demo_model, text):
    pytest.importorskip("lm_eval")
    asked = ["eval", demo_model, "--text", text, "--limit", 512, "--ctx", 64]
    asked += ["--tasks", "cloze", "--task-limit", 4]
    close(json.loads(far(*asked, "--json", "-q").out), make(*asked))


@pytest.mark.parametrize("options", [[], ["--temperature", "1", "--seed", "3"]])
def test_generate_continues_as_on_the_cpu(far, make, source, options):
    make("int8", source, "-o", "made")
    asked = ["generate", source, "made", "-p", "Ba da", "-n", 12, "--dtype", "float32", *options]
    found, wanted = json.loads(far(*asked, "--json", "-q").out), make(*asked)
    assert [row["text"] for row in found["models"]] == [row["text"] for row in wanted["models"]]


def test_inspect_leaves_the_device_alone(far, quantkit, source):
    """It decodes one weight at a time, as fast as a disk delivers them: the CPU's work."""
    far("nf4", source, "-o", "made", "-q")
    with far_device.present():
        for asked in (["inspect", "made", "--deep"], ["inspect", source, "made"], ["plan", source]):
            assert quantkit(*asked, "-q").code == 0
    assert not DEVICE.launches and not DEVICE.syncs


# ---- what a device can and cannot do


@pytest.mark.parametrize(
    "device", [{"float64": False}, {"streams": False}, {"float64": False, "streams": False}]
)
@pytest.mark.parametrize("method", ["gptq", "nf4 gptq", "int8", "awq gptq"])
def test_a_device_without_float64_or_streams_will_do(both, source, method, device):
    name, *rest = METHODS[method]
    rest += ["--states", "host"] if "gptq" in method else []
    same_tensors(*both(name, source, *rest, **device))


@pytest.mark.parametrize("method", ["gptq", "gptq repeat", "awq"])
def test_states_that_wait_on_the_host_change_no_byte(both, source, method):
    name, *rest = METHODS[method]
    same_tensors(*both(name, source, *rest, "--states", "host"))


def test_eval_without_float64(far, make, source, text):
    asked = ["eval", source, "--as", "int8", "--text", text, "--ctx", 32, "--limit", 640]
    close(json.loads(far(*asked, "--json", "-q", float64=False).out), make(*asked))
