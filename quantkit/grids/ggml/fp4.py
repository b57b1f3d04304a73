"""MXFP4 and NVFP4 as in ggml (quantize_row_mxfp4_ref, quantize_row_nvfp4_ref): 4-bit floats in ggml blocks of
32 with a power of two, or of 64 with four e4m3 scales.

ggml counts in halves: values are 0, 1, 2, 3, 4, 6, 8 and 12 times half a scale. Its own encoders fit the
largest weight and ignore importance; `grids/fp4.py` searches. NVFP4 stores scales times a divisor, or most
would be too small for e4m3; the tensor `NAME.scale` holds its reciprocal.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.grids import fp4
from quantkit.grids.fp4 import E4M3_MIN, Fp4Levels, MxFp4Grid, NvFp4Grid
from quantkit.grids.ggml.block import BlockGrid, BlockParams, Blocks, Encoded, join, split
from quantkit.grids.grid import Grid
from quantkit.grids.levels import usable

HALF = 0.5
LEAST_NORMAL = 2.0**-6  # e4m3
LEAST_HALF = -128  # exponent of half of MXFP4's smallest scale, byte 0; ggml's overflows to byte 255
MIDPOINTS = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)  # between values, in halves; ggml rounds ties down


@dataclass(frozen=True)
class E4m3Scales:
    """The step is half a scale, divided by divisor. scales: e4m3 in float32, `[..., 4]`; divisor: `[...]`."""

    scales: Tensor
    divisor: Tensor

    def steps(self) -> tuple[Tensor, Tensor]:
        return self.scales * HALF / self.divisor[..., None], torch.zeros_like(self.scales)


class Fp4Blocks(Fp4Levels, BlockGrid):
    """Base of MXFP4 and NVFP4. Codes are the bits of e2m1; a step is half a scale."""

    def in_levels(self, step: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        """Return step and low for levels: a step is two UNITS."""
        return usable(step / (fp4.UNITS * HALF)), low

    def _level(self, codes: Tensor) -> Tensor:
        return self.levels(codes).div_(fp4.UNITS * HALF).add_(0.0)  # never -0

    def _nearest(self, level: Tensor) -> Tensor:
        return _codes(level, level.new_ones(1))

    def clipped(self, params: Any) -> int:
        """Return 0: the search cuts off weights on purpose."""
        return 0


class Mxfp4Blocks(Fp4Blocks):
    """MXFP4: d is half of a power of two."""

    floats, untrained = Grid.floats, (fp4.POWERS_OF_TWO, "choose another type for the tensors to distill")

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> BlockParams:
        return BlockParams(MxFp4Grid().fit(weight, importance).scale * HALF)

    def scaled(self, params: BlockParams, factor: Tensor) -> BlockParams:
        return BlockParams(MxFp4Grid()._storable(params.d / HALF * factor) * HALF)

    def _encode(self, blocks: Blocks) -> Encoded:
        largest = blocks.x.abs().amax(0)  # C rounds the logarithm to float32 before the floor
        wide = largest.double() if largest.device.type == "cpu" else largest
        exponent = wide.log2().float().floor().clamp_(min=LEAST_HALF + 3).to(torch.int32) - 3
        d = torch.ldexp(torch.ones_like(largest), exponent)
        yield BlockParams(d)
        yield _codes(blocks.x, d)


@dataclass(frozen=True)
class Nvfp4Blocks(fp4.Divided, Fp4Blocks):
    """NVFP4."""

    divisor: float | None = None
    _storable = NvFp4Grid._storable

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> E4m3Scales:
        """Return, for every 16 weights, the best scale near the scale that fits the largest weight."""
        grid = NvFp4Grid(divisor=self.together([weight]).divisor)
        weights = [None] * 4 if importance is None else importance.split(self.sub_size, -1)
        sub_blocks = zip(weight.split(self.sub_size, 1), weights, strict=True)
        fitted = [grid.fit(*sub_block) for sub_block in sub_blocks]
        return E4m3Scales(torch.stack([params.scale for params in fitted], 1), fitted[0].divisor)

    def quantize(self, weight: Tensor, importance: Tensor | None = None) -> tuple[Tensor, E4m3Scales]:
        return super(Nvfp4Blocks, self.together([weight])).quantize(weight, importance)

    def refit(self, weight: Tensor, params: E4m3Scales, k: int, importance: Tensor) -> E4m3Scales:
        scales = params.scales.clone()
        scales[:, k] = NvFp4Grid(divisor=self.divisor).fit_columns(weight.contiguous(), importance).scale
        return replace(params, scales=scales)

    def scaled(self, params: E4m3Scales, factor: Tensor) -> E4m3Scales:
        return replace(params, scales=self._storable(params.scales * factor[:, None]))

    def floats(self, params: E4m3Scales) -> dict[str, Tensor]:
        """Return the stored scales, not divided by the divisor."""
        return {"scales": params.scales}

    def _encode(self, blocks: Blocks) -> Encoded:
        n = blocks.x.shape[1]
        x = split(blocks.x, self.sub_size)
        scale = _ue4m3(x.abs().amax(0) * self.divisor / fp4.LARGEST_FP4)
        yield E4m3Scales(scale.view(-1, n).t(), torch.full((n,), self.divisor, device=x.device))
        yield join(_codes(x * self.divisor, torch.where(scale == 0, torch.inf, scale * HALF)), n)


def _codes(x: Tensor, d: Tensor) -> Tensor:
    """Return the codes (float32) of the values nearest to `x` in units of `d`. Comparisons are exact: the
    result is the first code with the smallest of all sixteen distances."""
    codes, size = torch.zeros_like(x), x.abs()
    for midpoint in MIDPOINTS:
        codes += size > midpoint * d
    return codes.add_((x < 0) & (codes > 0), alpha=fp4.SIGN)


def _ue4m3(scale: Tensor) -> Tensor:
    """Return the nearest unsigned e4m3, ties up; 0 below half of the smallest value."""
    _, exponent = torch.frexp(scale)
    unit = torch.ldexp(torch.ones_like(scale), (exponent - 4).clamp(min=-9))
    rounded = (scale / unit + 0.5).floor_().mul_(unit)
    return torch.where(scale < LEAST_NORMAL, rounded.clamp(max=LEAST_NORMAL - E4M3_MIN), rounded)


GRIDS = {
    "MXFP4": Mxfp4Blocks("MXFP4", 4, 32),
    "NVFP4": Nvfp4Blocks("NVFP4", 4, 64, 16),
}
