"""int8 and nf4 checkpoints written by quantkit, loaded by transformers with bitsandbytes."""

import cases
import pytest
import torch
from cases import Case
from nights import by_day

pytestmark = cases.MARKS

# bitsandbytes' 4-bit kernel for CPUs computes in bfloat16, and what it decodes is float16: so the decoded
# weights are compared bit by bit, and logits of the decoded model within 2^-11.
INT8, NF4 = 1e-4, 1e-3
FLIPS = 5e-3  # a difference of 1e-7 in an activation halfway between two codes is one of 1/127
CASES = {
    "int8": Case(method="int8", loader="bitsandbytes", tolerance=INT8),
    "int8, threshold 0": Case({"threshold": 0.0}, method="int8", loader="bitsandbytes", tolerance=INT8),
    "int8, exclude": Case(method="int8", exclude=(r"layers\.0\.",), loader="bitsandbytes", tolerance=INT8),
    "int8, qwen2": Case(source="qwen2", method="int8", loader="bitsandbytes", tolerance=INT8),
    "int8, opt": Case(source="opt", method="int8", loader="bitsandbytes", tolerance=FLIPS),
    "nf4": Case(method="nf4", loader="bitsandbytes decoded", tolerance=NF4),
    "nf4, kernel": Case(method="nf4", loader="bitsandbytes", tolerance=3e-2),
    "nf4, single": Case({"double_quant": False}, method="nf4", loader="bitsandbytes decoded", tolerance=NF4),
    "nf4, gptq": Case({"solver": "gptq"}, method="nf4", loader="bitsandbytes decoded", tolerance=NF4),
    "nf4, exclude": Case(
        method="nf4", exclude=(r"mlp\.down_proj",), loader="bitsandbytes decoded", tolerance=NF4
    ),
    "nf4, qwen2": Case(
        source="qwen2", method="nf4", exclude=("down_proj",), loader="bitsandbytes decoded", tolerance=NF4
    ),  # whose down_proj has rows of 160, no multiple of 64
    "nf4, tied": Case(
        source="qwen2 tied",
        method="nf4",
        exclude=("down_proj",),
        loader="bitsandbytes decoded",
        tolerance=NF4,
    ),
}
DAY = ("int8, exclude", "nf4, kernel", "nf4, tied")


@pytest.mark.parametrize("name", by_day(CASES, DAY))
def test_client_computes_what_quantkit_wrote(name, folders, client):
    case, theirs = CASES[name], client[name]
    cases.inspect_agrees(case, folders[name], theirs)
    assert theirs["error"] is None
    rows = cases.linears(folders[name])
    if case.loader == "bitsandbytes":
        assert theirs["packed"] == sum("grid" in row for row in rows)
    assert bool(case.exclude) == any("kept" in row for row in rows)
    cases.compare(case, folders[name], theirs)


@pytest.mark.parametrize(
    "name", by_day([name for name, case in CASES.items() if "decoded" in case.loader], DAY)
)
def test_client_decodes_the_same_weights(name, folders, client):
    cases.same_weights(folders[name], client[name], torch.Tensor.half)
