"""Integer grid with a float offset, as MLX stores it: `w = scale * code + bias`, code in 0 .. 2^bits - 1.

Scale and bias are stored in the model's own type. MLX's CPU kernels round the product and the sum to this
type (`mx.dequantize`, mlx 0.32), and so does `decode`. Its Metal kernels accumulate in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.grids.affine import AffineGrid
from quantkit.grids.grid import select
from quantkit.grids.levels import HALF_MAX, HALF_MIN, WholeLevels
from quantkit.grids.parallel import for_each, rows_at_once

FITS = 3  # least squares of scale and bias, each followed by rounding
TEMPORARIES = 8
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class BiasedParams:
    """scale, bias: in the stored type, `[rows]` for one group or `[out, groups]` for a matrix."""

    scale: Tensor
    bias: Tensor


@dataclass(frozen=True)
class BiasedGrid(WholeLevels):
    """bits: 2 to 8. dtype: stored type of scale and bias. search: choose them by the least
    importance-weighted squared error, starting from the best integer zero point (`AffineGrid`). clip: see
    Grid."""

    bits: int
    group_size: int
    dtype: str = "bfloat16"
    search: bool = True
    clip: bool = False
    floating = "scale", "bias"

    describe = AffineGrid.describe  # it looks at fields that both have

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> BiasedParams:
        start = AffineGrid(self.bits, self.group_size, symmetric=False, search=self.search)
        integers = start.fit(weight, importance)
        params = self._stored(integers.scale, -integers.scale * integers.zero)
        if self.search:
            cost = torch.ones_like(weight[0]) if importance is None else importance
            rows = rows_at_once(weight.device, self.group_size, TEMPORARIES)
            pieces = zip(*(part.split(rows) for part in (weight, *vars(params).values())), strict=True)
            for_each(lambda *piece: self._improve(*piece, cost), list(pieces))
        return params

    def _improve(self, weight: Tensor, scale: Tensor, bias: Tensor, cost: Tensor) -> None:
        """Replace scale and bias `[rows]`, in place, by those of least squares where these lose less."""
        best = params = BiasedParams(scale, bias)
        share, codes = cost / cost.sum().clamp(min=TINY), self.round(weight, params)
        least = (self.decode(codes, params) - weight).square_() @ cost
        for _ in range(FITS):
            params = self._least_squares(codes.float(), weight, share, params)
            codes = self.round(weight, params)
            lost = (self.decode(codes, params) - weight).square_() @ cost
            best, least = select(lost < least, params, best), torch.minimum(lost, least)
        scale.copy_(best.scale)
        bias.copy_(best.bias)

    def _least_squares(self, codes: Tensor, weight: Tensor, share: Tensor, old: BiasedParams) -> BiasedParams:
        """Return the scale and bias of least squared error for these codes. share: of each column, sum 1."""
        middle, mean = codes @ share, weight @ share
        codes = codes - middle[:, None]
        power = codes.square() @ share
        scale = (codes * (weight - mean[:, None])) @ share / power
        scale = torch.where((power > 0) & (scale > 0), scale, old.scale.float())
        scale = self._stored(scale, scale).scale
        return BiasedParams(scale, (mean - scale.float() * middle).to(scale.dtype))

    def _stored(self, scale: Tensor, bias: Tensor) -> BiasedParams:
        """Return scale and bias in the stored type; the scale stays above 0."""
        dtype = getattr(torch, self.dtype)
        return BiasedParams(scale.clamp(HALF_MIN, HALF_MAX).to(dtype), bias.to(dtype))

    def round(self, weight: Tensor, params: BiasedParams) -> Tensor:
        """Return the nearest codes, uint8, for `weight [rows, group_size]`; ties go to even."""
        codes = (weight - params.bias.float()[:, None]).div_(params.scale.float()[:, None])
        return codes.round_().clamp_(0, 2**self.bits - 1).to(torch.uint8)

    def decode(self, codes: Tensor, params: BiasedParams) -> Tensor:
        """Return values, float32 `[rows, group_size]`; product and sum are rounded to the stored type."""
        return (codes.to(params.scale.dtype) * params.scale[:, None] + params.bias[:, None]).float()

    def steps(self, params: BiasedParams) -> tuple[Tensor, Tensor]:
        return params.scale.float()[None], -params.bias.float()[None]

    def scaled(self, params: BiasedParams, factor: Tensor) -> BiasedParams:
        return self._stored(params.scale.float() * factor, params.bias.float() * factor)

    def storable(self, floats: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return vars(self._stored(floats["scale"], floats["bias"]))
