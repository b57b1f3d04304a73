"""Packing and quantized activations against the compressed-tensors library itself, bit for bit."""

import json
import subprocess
from itertools import product
from pathlib import Path

import cases
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.grids.float8 import FLOAT8, MxFp8Grid
from quantkit.layouts._packing import pack
from quantkit.layouts.compressed_tensors import detect
from quantkit.layouts.compressed_tensors.activations import rounded
from quantkit.layouts.compressed_tensors.floats import MxFp8
from quantkit.quantize.solvers import rtn

pytestmark = cases.MARKS

INPUTS = {
    "int8 tokens": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    "float8 tokens": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    "float8 groups": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True},
    "nvfp4": {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local",
        "scale_dtype": "torch.float8_e4m3fn",
    },
    "mxfp4": {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True,
        "scale_dtype": "torch.uint8",
    },
    "mxfp8": {
        "num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True,
        "scale_dtype": "torch.uint8",
    },
    "float8 static": {"num_bits": 8, "type": "float", "strategy": "tensor"},
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = list(product(range(2, 9), (0, 1)))


def hidden(dtype: torch.dtype) -> torch.Tensor:
    """`[batch, tokens, in]` with tokens of unlike size, and one of zeros."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 16, 64, generator=generator) * torch.logspace(-3, 3, 16)[:, None]
    values[0, 3] = 0
    values[0, 4] *= 2**-19  # of a power of two that float16 does not hold
    return values.to(dtype)


def weight(dtype: torch.dtype) -> torch.Tensor:
    """Of all sizes, and with largest weights at and around the limit of a power of two."""
    generator = torch.Generator().manual_seed(1)
    found = torch.randn(48, 256, generator=generator) * torch.logspace(-2, 2, 48)[:, None]
    found[0, :4], found[0, 32:36] = torch.tensor([7.0]), torch.tensor([6.96875])
    return found.to(dtype)


def codes(bits: int) -> torch.Tensor:
    return torch.randint(2**bits, (64, 96), generator=torch.Generator().manual_seed(bits))


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("library")
    inputs, arguments = {}, {}
    for bits, dim in WIDTHS:
        inputs[f"packed.{bits}.{dim}"] = (codes(bits) - 2 ** (bits - 1)).to(torch.int8)
    for name, dtype in product(INPUTS, DTYPES):
        key = f"{name} {dtype}"
        arguments[key] = INPUTS[name]
        inputs[f"input.{key}"] = hidden(dtype)
        if name == "nvfp4":
            inputs[f"global.{key}"] = torch.tensor([0.79])  # of a smaller largest input: some are cut off
        if "static" in name:
            inputs[f"scale.{key}"] = torch.tensor([0.037]).to(dtype)
            zero = torch.tensor([0], dtype=torch.int8)
            inputs[f"zero.{key}"] = zero.to(torch.float8_e4m3fn) if "float8" in name else zero
    inputs |= {f"weight.{dtype}": weight(dtype) for dtype in DTYPES}
    save_file(inputs, folder / "inputs.safetensors")
    (folder / "arguments.json").write_text(json.dumps(arguments))
    script = Path(__file__).with_name("library.py")
    done = subprocess.run(
        [cases.PYTHON, str(script), str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return inputs | {f"theirs.{name}": t for name, t in load_file(folder / "outputs.safetensors").items()}


@pytest.mark.parametrize("bits, dim", WIDTHS)
def test_packing(bits, dim, library):
    own = pack(codes(bits), bits) if dim == 0 else pack(codes(bits).t(), bits).t()
    assert torch.equal(own, library[f"theirs.packed.{bits}.{dim}"])


@pytest.mark.parametrize("name, dtype", list(product(INPUTS, DTYPES)))
def test_quantized_inputs(name, dtype, library):
    kind = "float" if "static" in name else "int"  # static scales are read with float8 weights alone
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": kind, "strategy": "channel"},
        "input_activations": INPUTS[name],
        "format": f"{kind}-quantized",
    }
    layout = detect({"quant_method": "compressed-tensors", "config_groups": {"g": group}})
    scale = library.get(f"global.{name} {dtype}", library.get(f"scale.{name} {dtype}"))
    own = rounded(hidden(dtype), layout.at("a").scheme.activations, scale)
    assert own.dtype == dtype and torch.equal(own, library[f"theirs.input.{name} {dtype}"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_in_mxfp8(dtype, library):
    """Codes and exponents, written as they are by llm-compressor's preset."""
    form = MxFp8()
    found = form.encode(rtn.quantize(weight(dtype).float(), MxFp8Grid()))
    theirs = library[f"theirs.weight.{dtype}"]
    assert found["weight"].dtype == theirs.dtype == FLOAT8
    assert torch.equal(found["weight_scale"], library[f"theirs.scale.{dtype}"])
    assert torch.equal(found["weight"].view(torch.uint8), theirs.view(torch.uint8))
    assert found["weight_scale"][0, :2].tolist() == [127 + 3 - 8, 127 + 2 - 8]
