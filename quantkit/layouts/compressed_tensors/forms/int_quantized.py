"""int-quantized: integers of up to 8 bits, a byte each: `weight` int8 `[out, in]`, scales per tensor, row,
group or block. Read, not written. Format: compressed-tensors 0.20 `compressors/naive_quantized`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quantkit.layouts.compressed_tensors.forms import DECODED

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.grids.grid import QuantizedWeight
    from quantkit.layouts.compressed_tensors.stored import StoredWeight

NAME = "int-quantized"
SUFFIXES = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point")


def reads(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a linear is stored so."""
    return "weight_packed" not in tensors and not _is_float8(tensors["weight"])


def _is_float8(weight: Tensor) -> bool:
    import torch

    return weight.dtype == torch.float8_e4m3fn


def decode(stored: StoredWeight) -> QuantizedWeight:
    """Codes and parameters. Raises QuantkitError for parts that do not fit one another."""
    import torch

    weight, numbers = stored.matrix(), stored.numbers
    bits = numbers.bits if numbers else 8
    half = 2 ** (bits - 1)
    low, high = (int(end) for end in weight.aminmax()) if weight.dtype == torch.int8 else (-1000, 1000)
    if low < -half or high >= half or (numbers and numbers.kind != "int"):
        raise stored.broken("weight", f"is {weight.dtype} from {low} to {high}, not of {stored.called()}")
    return stored.affine((weight.short() + half).to(torch.uint8), bits)


CLIENTS = {
    "transformers": [
        {"form": "int8", "activations": False, "experts": False, "mixed": False, "loads": True, **DECODED}
    ],
    "vLLM": [
        {"form": "int8", "activations": False, "loads": False, "note": "its CPU build has no kernel for it"}
    ],
}
