"""float-quantized: `weight` float8 e4m3 `[out, in]`, `weight_scale` per tensor, row, group or
block. Read, not written. Format: compressed-tensors 0.20 `compressors/naive_quantized`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.grids.grid import QuantizedWeight
    from quantkit.layouts.compressed_tensors.stored import StoredWeight

NAME = "float-quantized"
SUFFIXES = ("weight", "weight_scale", "weight_g_idx", "input_scale")


def reads(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a linear is stored so."""
    import torch

    return "weight_packed" not in tensors and tensors["weight"].dtype == torch.float8_e4m3fn


def decode(stored: StoredWeight) -> QuantizedWeight:
    """Codes and parameters. Raises QuantkitError for parts that do not fit one another."""
    import torch

    from quantkit.grids.float8 import Float8Grid, Float8Params
    from quantkit.grids.grid import QuantizedWeight

    weight, numbers = stored.matrix(), stored.numbers
    if numbers and (numbers.kind, numbers.symmetric) != ("float", True):
        raise stored.broken("weight", f"is {weight.dtype}, not of symmetric {stored.called()}")
    scale, group_size = stored.scale(weight)
    column_group = stored.column_group(weight.shape[1], group_size, scale.shape[1])
    return QuantizedWeight(
        Float8Grid(group_size), weight.view(torch.uint8), Float8Params(scale), column_group
    )


CLIENTS: dict[str, list[dict]] = {}
