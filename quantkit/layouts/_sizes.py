"""What planning wants to know of layouts without torch: bytes of one packed linear `[out, in]`, families."""

from __future__ import annotations

import json

NF4_BLOCK, NF4_NESTED_BLOCK = 64, 256
INT32_BYTES = FLOAT32_BYTES = 4
SCALE_BITS = 16
# Where transformers replaces an activation by a scaled one (integrations/awq.py, AWQ_SCALES_MAPPINGS).
ACTIVATION_SCALES = (
    "starcoder2", "RefinedWebModel", "falcon", "mpt", "gptj", "gpt_neox", "gpt_bigcode", "bloom"
)  # fmt: skip
TABLE_VALUES, NESTED_TABLE_VALUES = 16, 256  # of NF4, and of the 8-bit codes of its scales


def gptq(out_features: int, in_features: int, bits: int, group_size: int) -> int:
    """qweight, qzeros, scales and g_idx."""
    groups = in_features // group_size
    codes = out_features * in_features * bits // 8
    return codes + groups * out_features * (SCALE_BITS + bits) // 8 + INT32_BYTES * in_features


def awq(out_features: int, in_features: int, bits: int, group_size: int) -> int:
    """qweight, qzeros and scales."""
    groups = in_features // group_size
    return out_features * in_features * bits // 8 + groups * out_features * (SCALE_BITS + bits) // 8


def int8(out_features: int, in_features: int) -> int:
    """weight, SCB and weight_format."""
    return out_features * in_features + FLOAT32_BYTES * out_features + 1


def nf4(out_features: int, in_features: int, double_quant: bool) -> int:
    """weight, the table, scales, and the JSON text, whose length is right within a few digits."""
    blocks = out_features * in_features // NF4_BLOCK
    scales, offset = FLOAT32_BYTES * blocks, None
    if double_quant:
        nested = -(-blocks // NF4_NESTED_BLOCK) + NESTED_TABLE_VALUES
        scales, offset = blocks + FLOAT32_BYTES * nested, 0.12345678901234567
    text = len(nf4_state(out_features, in_features, offset))
    return out_features * in_features // 2 + FLOAT32_BYTES * TABLE_VALUES + scales + text


def nf4_state(out_features: int, in_features: int, offset: float | None) -> bytes:
    """The JSON text of an NF4 weight's quantization state; offset: of nested scales."""
    state = {
        "quant_type": "nf4",
        "blocksize": NF4_BLOCK,
        "dtype": "float16",
        "shape": [out_features, in_features],
    }
    if offset is not None:
        state |= {
            "nested_blocksize": NF4_NESTED_BLOCK,
            "nested_dtype": "float32",
            "nested_offset": offset,
        }
    return json.dumps(state).encode()
