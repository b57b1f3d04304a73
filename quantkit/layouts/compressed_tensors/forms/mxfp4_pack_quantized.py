"""mxfp4-pack-quantized: 4-bit floats with a power of two for 32 of them.

`weight_packed` uint8 `[out, in / 2]`; `weight_scale` uint8 `[out, in / 32]`, an exponent plus 127. Inputs
that are rounded, too, get powers of two of their own at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quantkit.layouts.compressed_tensors import fp4

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.grids.grid import Grid, QuantizedWeight
    from quantkit.layouts import Width
    from quantkit.layouts.compressed_tensors.stored import StoredWeight

NAME = "mxfp4-pack-quantized"
SUFFIXES = ("weight_packed", "weight_scale")
GROUP = 32
BIAS = 127


class MxFp4Packed(fp4.Fp4Form):
    """See the module."""

    NAME = NAME
    GROUP = GROUP
    STRATEGY = "group"
    SCALE_DTYPE = "torch.uint8"
    SCALE = "U8"
    floats = ()

    def holds(self, grid: Grid | Width) -> bool:
        """Groups of 32 of 4 bits."""
        return (grid.bits, grid.group_size) == (fp4.BITS, GROUP)

    def scales(self, scale: Tensor) -> Tensor:
        """Their exponents."""
        import torch

        return (torch.frexp(scale).exponent + BIAS - 1).to(torch.uint8).contiguous()


def reads(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a linear is stored so."""
    return fp4.is_packed(tensors) and "weight_global_scale" not in tensors


def decode(stored: StoredWeight) -> QuantizedWeight:
    """Codes and parameters. Raises QuantkitError for parts that do not fit one another."""
    import torch

    from quantkit.grids.fp4 import Fp4Params, MxFp4Grid
    from quantkit.grids.grid import QuantizedWeight

    codes, scale = fp4.parts(stored, GROUP, MxFp4Packed.SCALE_DTYPE)
    scale = torch.ldexp(torch.ones(scale.shape, device=scale.device), scale.to(torch.int32) - BIAS)
    return QuantizedWeight(MxFp4Grid(), codes, Fp4Params(scale, torch.ones_like(scale)))


CLIENTS = {
    "transformers": [{"form": "mxfp4", **fp4.PLAIN}],
    "vLLM": [{"form": "mxfp4", **fp4.NO_KERNEL}],
}
