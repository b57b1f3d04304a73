"""AWQ GEMM checkpoints written by quantkit, loaded by transformers with GPTQModel's kernels."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import cases
import pytest
from cases import Case

from quantkit import methods
from quantkit.grids.affine import AffineGrid
from quantkit.layouts.awq import AwqLayout
from quantkit.methods import Method
from quantkit.solvers.rtn import RtnSolver

pytestmark = cases.MARKS


@dataclass(frozen=True)
class Options:
    group_size: int = 128
    zero_point: bool = True


def build(options: Options) -> Method:
    """Round to nearest: the layout is what is tested here."""

    def make_grid(out_features, in_features, override):
        group_size = in_features if options.group_size == -1 else options.group_size
        return AffineGrid(4, group_size, symmetric=not options.zero_point)

    return Method("rtn", RtnSolver(), AwqLayout(options.group_size, options.zero_point), make_grid)


def quantize(case, source, output):
    with pytest.MonkeyPatch.context() as patch:
        module = SimpleNamespace(check=lambda options: None, suffix=lambda options: "awq", build=build)
        patch.setattr(methods, "load", lambda name: module)
        cases.run_job(case, source, output, "awq", Options(**case.options))


TOLERANCE = 5e-3  # the kernel multiplies in float16, whatever the model computes in
CASES = {
    "groups of 128": Case(loader="awq"),
    "float16": Case(loader="awq", dtype="float16"),
    "bfloat16": Case(loader="awq", dtype="bfloat16"),
    "groups of 32": Case({"group_size": 32}, loader="awq"),
    "whole rows": Case({"group_size": -1}, loader="awq"),
    "symmetric": Case({"zero_point": False}, loader="awq"),
    "shards": Case(max_shard_gb=0.002, loader="awq"),
    "exclude": Case(exclude=(r"layers\.0\.", r"layers\.3\.mlp\.down_proj"), loader="awq"),
    "qwen2": Case({"group_size": 32}, "qwen2", loader="awq"),
    "qwen2 tied": Case({"group_size": 32}, "qwen2 tied", loader="awq"),
    "opt": Case({"group_size": 32}, "opt", loader="awq"),
}


@pytest.fixture(scope="module")
def folders(demo_model, tmp_path_factory):
    return cases.make(CASES, tmp_path_factory.mktemp("awq"), demo_model, quantize)


@pytest.fixture(scope="module")
def client(folders, tmp_path_factory):
    return cases.load(CASES, folders, tmp_path_factory.mktemp("client"))


@pytest.mark.parametrize("name", CASES)
def test_client_computes_what_quantkit_wrote(name, folders, client):
    case, theirs = CASES[name], client[name]
    assert theirs["error"] is None
    linears = cases.linears(folders[name])
    quantized = sum("grid" in linear for linear in linears)
    assert theirs["packed"] == quantized
    assert bool(case.exclude) == (quantized < len(linears))
    cases.compare(replace(case, tolerance=TOLERANCE), folders[name], theirs)
