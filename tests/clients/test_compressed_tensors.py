"""compressed-tensors checkpoints written by quantkit, loaded by transformers with the library itself."""

import json
from dataclasses import replace

import cases
import pytest
import torch
from cases import Case
from nights import by_day

from quantkit.models.files.open import open_checkpoint

pytestmark = cases.MARKS


EXCLUDE = (r"layers\.0\.", r"layers\.1\.mlp\.down_proj")
OVERRIDE = (r"layers\.1\.mlp=8", r"[qkv]_proj$=4,32")


def packed(source: str = "demo", loader: str = "dequantized", **options) -> Case:
    return Case({"layout": "compressed-tensors", **options}, source, loader=loader)


# Zero points load with dequantize=True alone: else transformers makes room for unpacked ones, and refuses.
# Overrides load with dequantize=False alone: else transformers 5.23 takes the first config group for all.
CASES = {
    "4 bit": packed(),
    "4 bit, compressed": packed(loader="compressed"),
    "4 bit, asymmetric": packed(sym=False),
    "4 bit, channel, compressed": packed(group_size=-1, loader="compressed"),
    "4 bit, channel, asymmetric": packed(group_size=-1, sym=False),
    "8 bit": packed(bits=8),
    "3 bit, asymmetric": packed(bits=3, sym=False),
    "5 bit, channel, compressed": packed(bits=5, loader="compressed", group_size=-1),
    "8 bit, compressed": packed(bits=8, loader="compressed"),
    "8 bit, channel, asymmetric": packed(bits=8, group_size=-1, sym=False),
    "qwen2": packed("qwen2", group_size=32),  # biases
    "fp8 inputs, compressed": packed(loader="compressed", activations="fp8"),
    "int8 inputs, compressed": packed(loader="compressed", activations="int8"),
    "head": packed("qwen2", group_size=32, head=4),
    "head, compressed": packed("qwen2", "compressed", group_size=32, head=4),
    "head of 8 bit, compressed": packed("qwen2", "compressed", group_size=32, head=8),
    "qwen2 tied, compressed": packed("qwen2 tied", "compressed", group_size=32),
    "opt": packed("opt", "compressed", group_size=32),
    "gpt_neox": packed("gpt_neox", "compressed", group_size=32),  # whose head is not called lm_head
    "mixtral": packed("mixtral", group_size=32),
    "qwen3_moe": packed("qwen3_moe", group_size=32),
    "qwen3_moe, awq": replace(  # its router is scaled, too
        packed("qwen3_moe", group_size=32, sym=True), method="awq"
    ),
    "exclude, compressed": replace(packed(loader="compressed"), exclude=EXCLUDE),
    "override": replace(packed(loader="compressed"), override=OVERRIDE, exclude=EXCLUDE),
}
DAY = ("4 bit", "3 bit, asymmetric", "override", "fp8 inputs, compressed", "head, compressed", "qwen3_moe")


@pytest.mark.parametrize("name", by_day(CASES, DAY))
def test_client_computes_what_quantkit_wrote(name, folders, client):
    case, theirs = CASES[name], client[name]
    cases.inspect_agrees(case, folders[name], theirs)
    assert theirs["error"] is None
    linears = cases.linears(folders[name])
    quantized = sum("grid" in linear for linear in linears)
    assert theirs["packed"] == (quantized if case.loader == "compressed" else 0)
    assert bool(case.exclude) == (quantized < len(linears))
    cases.compare(case, folders[name], theirs)


@pytest.mark.parametrize("name", by_day(CASES, DAY))
def test_client_decodes_the_same_weights_bit_for_bit(name, folders, client):
    """While loading it multiplies in the precision of the scales, float16; later in that of the model."""
    rounded = {"rounded": torch.Tensor.half} if CASES[name].loader == "dequantized" else {}
    cases.same_weights(folders[name], client[name], **rounded)


@pytest.mark.cases("override", "3 bit, asymmetric")
def test_cases_are_what_they_say(folders):
    """An override leaves linears of three kinds, and zero points vary."""
    linears = cases.linears(folders["override"])
    grids = {tuple(row["grid"][key] for key in ("bits", "group_size")) for row in linears if "grid" in row}
    assert grids == {(4, 128), (8, 128), (4, 32)} and any("kept" in row for row in linears)
    asymmetric = open_checkpoint(str(folders["3 bit, asymmetric"]))
    assert len(asymmetric.load("model.layers.1.mlp.down_proj.weight_zero_point").unique()) > 10


@pytest.mark.cases("qwen3_moe")
def test_routers_are_named_as_not_quantized(folders):
    """Which vLLM would make linears of, and look for packed."""
    config = json.loads((folders["qwen3_moe"] / "config.json").read_text())
    assert r"re:model\.layers\.0\.mlp\.gate(\.|$)" in config["quantization_config"]["ignore"]
