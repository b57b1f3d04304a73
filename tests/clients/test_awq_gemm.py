"""AWQ GEMM checkpoints written by quantkit, loaded by transformers with GPTQModel's kernels."""

from dataclasses import replace

import cases
import pytest
from cases import Case
from nights import by_day

pytestmark = cases.MARKS


TOLERANCE = 5e-3  # the kernel multiplies in float16, whatever the model computes in
CASES = {
    "groups of 128": Case(method="awq", loader="awq"),
    "float16": Case(method="awq", loader="awq", dtype="float16"),
    "groups of 32": Case({"group_size": 32}, method="awq", loader="awq"),
    "whole rows": Case({"group_size": -1}, method="awq", loader="awq"),
    "symmetric": Case({"sym": True}, method="awq", loader="awq"),
    "exclude": Case(exclude=(r"layers\.0\.", r"layers\.1\.mlp\.down_proj"), method="awq", loader="awq"),
    "qwen2 tied": Case({"group_size": 32}, "qwen2 tied", method="awq", loader="awq"),
    "opt": Case({"group_size": 32}, "opt", method="awq", loader="awq"),
}
DAY = ("exclude", "qwen2 tied")


@pytest.mark.parametrize("name", by_day(CASES, DAY))
def test_client_computes_what_quantkit_wrote(name, folders, client):
    case, theirs = CASES[name], client[name]
    cases.inspect_agrees(case, folders[name], theirs)
    assert theirs["error"] is None
    linears = cases.linears(folders[name])
    quantized = sum("grid" in linear for linear in linears)
    assert theirs["packed"] == quantized
    assert bool(case.exclude) == (quantized < len(linears))
    cases.compare(replace(case, tolerance=TOLERANCE), folders[name], theirs)
