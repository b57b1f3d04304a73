"""Affine integer grid: `w = scale * (code - zero)`, code in 0 .. 2^bits - 1, one (scale, zero) per group.

Scales are rounded to float16 before anything is rounded on them, since that is what gets stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.grids import matrix

SCALE_MIN = 2.0**-24  # smallest positive float16 (subnormal)
SCALE_MAX = 65504.0
CANDIDATES = 14  # ranges tried: 1 + 2 STEP, 1 + STEP, 1, 1 - STEP, ... of the group's full range
STEP = {2: 0.06, 3: 0.05, 4: 0.04, 5: 0.03, 6: 0.02, 7: 0.01, 8: 0.006}  # by bits
CHUNK = 1 << 18  # elements searched at a time: the temporaries stay in the cache


@dataclass(frozen=True)
class AffineParams:
    """scale, zero: float32, `[rows]` for one group or `[out, groups]` for a matrix.

    Scales are float16 values, zeros are integers in 0 .. 2^bits - 1.
    """

    scale: Tensor
    zero: Tensor


@dataclass(frozen=True)
class AffineGrid:
    """bits: 2 to 8. symmetric: zero is fixed at 2^(bits-1). zero_min: smallest zero a layout can store.

    search: choose the range that minimises the importance-weighted squared rounding error, instead
    of covering the group's largest weight. For each of `CANDIDATES` ranges the codes are rounded
    and the best scale for these codes follows in closed form, s = Σ h w c / Σ h c² with c = code - zero;
    rounded to float16, the range with the least error Σ h (w - s c)² wins.
    clip: given second moments, round to nearest cuts off each group's range by AWQ's search instead.
    """

    bits: int
    group_size: int
    symmetric: bool = True
    zero_min: int = 0
    search: bool = True
    clip: bool = False
    spans_matrix = False
    weighted = False

    @property
    def max_code(self) -> int:
        return 2**self.bits - 1

    @property
    def sub_size(self) -> int:
        return self.group_size

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> AffineParams:
        """Scale and zero, each `[rows]`, for `weight [rows, group_size]` (float32).

        `importance` broadcasts to weight's shape: the cost of a squared error in each place.
        """
        if not self.search:
            scale, zero = self._range(*_extremes(weight))
            return AffineParams(_storable(scale).float(), zero)
        step = max(1, CHUNK // weight.shape[1])
        parts = weight.split(step)
        shares = [None] * len(parts) if importance is None else importance.expand_as(weight).split(step)
        parts = [self._search(part, share) for part, share in zip(parts, shares, strict=True)]
        scale, zero = (torch.cat(side) for side in zip(*parts, strict=True))
        return AffineParams(scale.float(), zero)

    def fit_matrix(self, weight: Tensor, importance: Tensor | None = None) -> AffineParams:
        """Every group fitted by itself: `[out, groups]` for `weight [out, in]`."""
        if importance is not None:
            importance = importance.expand_as(weight).reshape(-1, self.group_size)
        return matrix(self.fit(weight.reshape(-1, self.group_size), importance), len(weight))

    def plain(self) -> AffineGrid:
        """The grid that covers each group's full range."""
        return replace(self, search=False, clip=False)

    def describe(self) -> str:
        """`4 bit, groups of 128`."""
        return f"{self.bits} bit, groups of {self.group_size}"

    def _range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero that cover `low` to `high`, where zero lies between."""
        if self.symmetric:
            half = torch.maximum(-low, high)
            return half * 2 / self.max_code, torch.full_like(half, 2 ** (self.bits - 1))
        scale = (high - low) / self.max_code
        zero = torch.round(-low / scale.clamp(min=SCALE_MIN))
        return scale, zero.clamp_(self.zero_min, self.max_code)

    def _search(self, weight: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor]:
        """Never worse than the full range, which is a candidate: of all float16 scales the one nearest
        to the best has the least error for given codes, and rounding anew can only lessen it."""
        best = best_scale = best_zero = None
        low, high = _extremes(weight)
        weighted = weight if importance is None else importance * weight
        codes, product = torch.empty_like(weight), torch.empty_like(weight)
        for k in range(CANDIDATES):
            shrink = 1 + (2 - k) * STEP[self.bits]
            scale, zero = self._range(low * shrink, high * shrink)
            scale = _storable(scale)
            self._clamp(torch.div(weight, scale[:, None], out=codes).round_(), zero[:, None])  # code - zero
            along = torch.mul(weighted, codes, out=product).sum(1)
            codes.square_()
            power = (codes if importance is None else codes.mul_(importance)).sum(1)
            scale = torch.where(along > 0, _storable(along / power), scale)
            gain = scale * (2 * along - scale * power)  # Σ h w² less the error of the scale as stored
            if best is None:
                best, best_scale, best_zero = gain, scale, zero
                continue
            better = gain > best
            best = torch.where(better, gain, best)
            best_scale = torch.where(better, scale, best_scale)
            best_zero = torch.where(better, zero, best_zero)
        return best_scale, best_zero

    def _clamp(self, steps: Tensor, zero: Tensor) -> Tensor:
        """code - zero within what there is, in place. Numbers are several times as fast as tensors here."""
        if self.symmetric:
            half = 2 ** (self.bits - 1)
            return steps.clamp_(-half, self.max_code - half)
        return steps.clamp_(-zero, self.max_code - zero)

    def clipped(self, params: AffineParams) -> int:
        """How many scales lie at the end of float16's range, where weights may be lost."""
        ends = (params.scale <= SCALE_MIN) | (params.scale >= SCALE_MAX)
        return int(ends.sum())

    def round(self, weight: Tensor, params: AffineParams) -> Tensor:
        """Nearest codes (half to even), uint8, for `weight [rows, group_size]`."""
        codes = (weight / params.scale[:, None]).round_().add_(params.zero[:, None])
        return codes.clamp_(0, self.max_code).to(torch.uint8)

    def round_column(self, column: Tensor, params: AffineParams, j: int) -> tuple[Tensor, Tensor]:
        """Codes (float32) and values of one column `[rows]`; every column of a group is alike here."""
        steps = self._clamp((column / params.scale).round_(), params.zero)
        return steps + params.zero, steps.mul_(params.scale)

    def decode(self, codes: Tensor, params: AffineParams) -> Tensor:
        """Values, float32 `[rows, group_size]`."""
        return (codes.float() - params.zero[:, None]) * params.scale[:, None]

    def nearest(self, weight: Tensor, params: AffineParams) -> Tensor:
        """`decode(round(weight, params), params)`, `[rows, group_size]`; in place of `weight`."""
        scale = params.scale[:, None]
        return self._clamp(weight.div_(scale).round_(), params.zero[:, None]).mul_(scale)

    def scaled(self, params: AffineParams, factor: Tensor) -> AffineParams:
        """Scales times `factor [rows]`, rounded to float16."""
        return AffineParams(_storable(params.scale * factor), params.zero)


def _extremes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest of each row, or zero."""
    return weight.amin(1).clamp_(max=0), weight.amax(1).clamp_(min=0)


def _storable(scale: Tensor) -> Tensor:
    """The nearest float16 scale that loses no weight; an all-zero group gets 1 (any would do)."""
    return torch.where(scale == 0, 1.0, scale.clamp(SCALE_MIN, SCALE_MAX)).half().to(scale.dtype)
