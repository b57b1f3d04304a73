"""NVFP4 and MXFP4 written by quantkit, loaded by transformers with compressed-tensors: weights and logits."""

import cases
import pytest
from cases import Case
from nights import by_day

pytestmark = cases.MARKS


def fp4(source: str = "demo", loader: str = "dequantized", **options) -> Case:
    return Case(options, source, loader=loader, method="fp4")


CASES = {
    "nvfp4": fp4(),
    "nvfp4, rounded": fp4(solver="rtn", transform="none"),
    "mxfp4": fp4(format="mxfp4"),
    "qwen2 nvfp4": fp4("qwen2"),  # biases
    "qwen2 tied mxfp4": fp4("qwen2 tied", format="mxfp4"),
    "gpt_neox nvfp4": fp4("gpt_neox"),
    "qwen3_moe mxfp4": fp4("qwen3_moe", format="mxfp4"),
    "mixtral mxfp4": fp4("mixtral", format="mxfp4"),
    "exclude": Case({}, loader="dequantized", method="fp4", exclude=(r"layers\.0\.", r"down_proj")),
}
ROUNDED = {  # inputs, too: which dequantize=True leaves as they are
    "nvfp4, inputs": fp4(activations=True),
    "mxfp4, inputs": fp4(format="mxfp4", activations=True),
}
CASES |= ROUNDED
DAY = ("mixtral mxfp4", "exclude", "nvfp4, inputs")


@pytest.mark.parametrize("name", by_day(CASES, DAY))
def test_client_computes_what_quantkit_wrote(name, folders, client):
    case, theirs = CASES[name], client[name]
    cases.inspect_agrees(case, folders[name], theirs)
    assert theirs["error"] is None and theirs["packed"] == 0
    if name not in ROUNDED:
        cases.compare(case, folders[name], theirs)


@pytest.mark.parametrize("name", by_day(CASES, DAY))
def test_client_decodes_the_same_weights_bit_for_bit(name, folders, client):
    """It decodes in bfloat16, in which quantkit's are exact."""
    cases.same_weights(folders[name], client[name])
