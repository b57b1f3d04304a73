"""Checkpoints loaded by mlx-lm, where QUANTKIT_MLX_PYTHON names a python with mlx and mlx-lm
(`scripts/clients-setup.sh mlx`)."""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import cases
import pytest
import torch
from cases import Case
from safetensors.torch import load_file

from quantkit.evaluation.engines import Declined, Engine
from quantkit.evaluation.windows import Windows
from quantkit.models.files.open import open_checkpoint

PYTHON = os.environ.get("QUANTKIT_MLX_PYTHON")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not PYTHON, reason="QUANTKIT_MLX_PYTHON names no python with mlx-lm"),
]
HERE = Path(__file__).parent
STORED = HERE.parent / "data" / "mlx.safetensors"


def mlx(
    source: str = "demo", method: str = "gptq", loader: str = "mlx", override: tuple = (), **options
) -> Case:
    groups = {} if method in ("fp4", "fp8") else {"group_size": 64}
    return Case({"layout": "mlx"} | groups | options, source, method=method, loader=loader, override=override)


CASES = {
    "4 bit": mlx(),
    "2 bit": mlx(bits=2),
    "3 bit, groups of 32": mlx(bits=3, group_size=32),
    "5 bit": mlx(bits=5),
    "6 bit, groups of 128": mlx(bits=6, group_size=128),
    "8 bit": mlx(bits=8),
    "override": mlx(override=("down_proj=8,32", r"layers\.0\.self_attn=3")),
    "rounded": mlx(solver="rtn"),
    "awq": mlx(method="awq"),
    "mxfp4": mlx(method="fp4", format="mxfp4"),
    "nvfp4": mlx(method="fp4"),
    "mxfp8": mlx(method="fp8", format="mxfp8"),
    "qwen2": mlx("qwen2", group_size=32),  # biases, float16
    "qwen2 tied": mlx("qwen2 tied", group_size=32),
    "head": mlx("qwen2", group_size=32, head=6),
    "head and embedding": mlx("qwen2", group_size=32, head=6, embedding=3),
    "awq, both": mlx("qwen2", "awq", group_size=32, head=6, embedding=8),
    "embedding as head": mlx("qwen2 tied", group_size=32, embedding=6),
    "qwen3_moe": mlx("qwen3_moe", group_size=32),
    "packed": mlx("qwen2", loader="packed", group_size=32),
    "awq layout": Case({"group_size": 64}, method="awq", loader="mlx"),
    "gptq layout": Case({"group_size": 64}, loader="mlx"),
    "compressed-tensors": Case({"group_size": 64, "layout": "compressed-tensors"}, loader="mlx"),
    "compressed-tensors nvfp4": Case(method="fp4", loader="mlx"),
}
TOLERANCE = {"packed": 2e-2, "awq layout": 2e-3}  # kernels accumulate in float16; zero points times scales do


def served(folder: Path, options: Sequence[str] = ("dtype=float32",)) -> tuple[torch.Tensor, int]:
    """Logits by mlx-lm, and the number of modules that it keeps packed. Raises Declined."""
    windows = Windows(torch.tensor([cases.IDS]), [0], None)
    engine = Engine.find("mlx", PYTHON, options)
    with engine.run(open_checkpoint(str(folder)), windows, torch.device("cpu")) as (facts, logits):
        assert facts["dtype"].startswith("float")  # not that of 8-bit scales
        packed = int(re.search(r"(\d+) modules", facts["kernels"])[1])
        return logits(0, (0, slice(0, len(cases.IDS) - 1))), packed


@pytest.fixture(scope="module")
def renamed(folders):
    """The folders with names that mlx-lm reads and transformers 5 does not write."""
    for folder in set(folders.values()):
        config = json.loads((folder / "config.json").read_text())
        config |= {"rope_theta": 10000.0} | ({"num_experts": 4} if "num_local_experts" in config else {})
        (folder / "config.json").write_text(json.dumps(config))
    return folders


@pytest.mark.parametrize("name", CASES)
def test_mlx_lm_computes_what_quantkit_wrote(name, renamed):
    case, folder = CASES[name], renamed[name]
    try:
        logits, packed = served(folder, ("dtype=float32",) * (case.loader != "packed"))
    except Declined as error:
        cases.inspect_agrees(case, folder, {"error": error.message})
        assert case.options.get("layout") != "mlx"
        return
    cases.inspect_agrees(case, folder, {"error": None})
    linears = (row["name"] for row in cases.linears(folder) if "grid" in row)
    assert packed == len({re.sub(r"experts\.\d+", "", linear) for linear in linears})
    expected = cases.Own(folder).logits(cases.IDS)[:-1]
    error = (logits - expected).norm() / expected.norm()
    assert error <= TOLERANCE.get(name, 1e-4), f"{error:.2e}"


def test_the_stored_tensors_are_those_of_mlx(tmp_path):
    script, made = str(HERE / "mlx_tensors.py"), tmp_path / "made.safetensors"
    subprocess.run([PYTHON, script, str(made)], check=True)
    found, stored = load_file(made), load_file(STORED)
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)


@pytest.mark.parametrize(("source", "packed", "decoded"), [("demo", 15, 15), ("qwen3_moe", 18, 36)])
def test_folders_of_mlx_lm_are_read(short_demo, tmp_path, source, packed, decoded):
    """Embedding and head, blocks and routers, stacked experts: as `mlx_lm.convert` writes them."""
    place, folder = short_demo, tmp_path / "converted"
    if source != "demo":
        cases.save_tiny(place := tmp_path / source, source, short_demo)
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0, "num_experts": 4}))
    convert = "from mlx_lm import convert; convert(*sys.argv[1:3], quantize=True, q_group_size=32)"
    subprocess.run([PYTHON, "-c", f"import sys; {convert}", str(place), str(folder)], check=True)
    logits, modules = served(folder)
    assert (modules, len(open_checkpoint(str(folder)).packed)) == (packed, decoded)
    expected = cases.Own(folder).logits(cases.IDS)[:-1]
    assert (logits - expected).norm() <= 1e-4 * expected.norm()
