"""nvfp4-pack-quantized: 4-bit floats with an e4m3 scale for 16 of them and a divisor of the whole matrix.

`weight_packed` uint8 `[out, in / 2]`; `weight_scale` float8 e4m3 `[out, in / 16]`; `weight_global_scale`
float32 `[1]`, by which scales are divided: `w = e2m1 * (weight_scale / weight_global_scale)`. Where inputs
are rounded, too, `input_global_scale` float32 `[1]`: 448 * 6 / (the largest input in calibration text);
scales of 16 inputs follow at run time. vLLM has one linear of q, k and v, and of gate and up, and takes the
largest divisor of those for all: theirs are to be the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantkit.layouts import LinearSpec, Table
from quantkit.layouts.compressed_tensors import fp4

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.grids.grid import Grid, QuantizedWeight
    from quantkit.layouts import Width
    from quantkit.layouts.compressed_tensors.stored import StoredWeight

NAME = "nvfp4-pack-quantized"
SUFFIXES = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
GROUP = 16
LARGEST = 448.0 * 6.0  # that e4m3 times e2m1 can be


class NvFp4Packed(fp4.Fp4Form):
    """See the module."""

    NAME = NAME
    GROUP = GROUP
    STRATEGY = "tensor_group"
    no_experts = "no client that was tried reads experts in NVFP4; in --format mxfp4 transformers does"
    SCALE_DTYPE = "torch.float8_e4m3fn"
    SCALE = "F8_E4M3"
    floats = ("weight_scale",)

    @property
    def needs(self) -> frozenset[str]:
        """Largest inputs, for their scale."""
        return frozenset({"peak"} if self.quantize_inputs else ())

    def holds(self, grid: Grid | Width) -> bool:
        """Groups of 16 of 4 bits."""
        return (grid.bits, grid.group_size) == (fp4.BITS, GROUP)

    def tensors(self, spec: LinearSpec) -> Table:
        """Codes, scales and one or two divisors."""
        divisors = ["weight_global_scale"] + ["input_global_scale"] * self.quantize_inputs
        return super().tensors(spec) | dict.fromkeys(divisors, ("F32", (1,)))

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Codes, scales and divisors."""
        tensors = super().encode(weight) | {
            "weight_global_scale": weight.params.divisor.flatten()[:1].float().clone()
        }
        if self.quantize_inputs:
            peak = weight.input_peak.float().view(1)
            tensors["input_global_scale"] = (LARGEST / peak).nan_to_num(1.0, 1.0, 1.0)
        return tensors

    def scales(self, scale: Tensor) -> Tensor:
        """e4m3."""
        import torch

        return scale.to(torch.float8_e4m3fn).contiguous()

    def _at_run_time(self) -> dict[str, Any]:
        return {"dynamic": "local", "observer": "static_minmax"}


def reads(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a linear is stored so."""
    return fp4.is_packed(tensors) and "weight_global_scale" in tensors


def decode(stored: StoredWeight) -> QuantizedWeight:
    """Codes and parameters. Raises QuantkitError for parts that do not fit one another."""
    from quantkit.grids.fp4 import Fp4Params, NvFp4Grid
    from quantkit.grids.grid import QuantizedWeight

    codes, scale = fp4.parts(stored, GROUP, NvFp4Packed.SCALE_DTYPE)
    divisor = stored.number("weight_global_scale")
    if not (divisor > 0).all():
        raise stored.broken("weight_global_scale", f"is {divisor.item():g}, not above 0")
    scale = scale.float()
    return QuantizedWeight(NvFp4Grid(), codes, Fp4Params(scale, divisor.expand_as(scale)))


CLIENTS = {
    "transformers": [
        {
            "form": "nvfp4",
            "experts": True,
            "loads": False,
            "note": "it leaves the divisors of experts out, and computes nonsense",
        },
        {"form": "nvfp4", **fp4.PLAIN},
    ],
    "vLLM": [{"form": "nvfp4", **fp4.NO_KERNEL}],
}
