"""Affine integer grid: `w = scale * (code - zero)`, code in 0 .. 2^bits - 1, one (scale, zero) per group.

Scales are rounded to float16 before anything is rounded on them, since that is what gets stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_MIN = 2.0**-24  # smallest positive float16 (subnormal)
SCALE_MAX = 65504.0
SHRINK = torch.linspace(1.0, 0.4, 16)  # candidate ranges, as fractions of the group's full range
CHUNK = 1 << 17  # elements searched at a time: the temporaries stay in the cache


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
    of covering the group's largest weight. For each of `SHRINK` ranges the codes are rounded and the
    best scale for these codes follows in closed form, s = Σ h w c / Σ h c² with c = code - zero; the
    range with the least error Σ h w² - (Σ h w c)² / Σ h c² wins.
    """

    bits: int
    group_size: int
    symmetric: bool = True
    zero_min: int = 0
    search: bool = True

    @property
    def max_code(self) -> int:
        return 2**self.bits - 1

    @property
    def bits_per_weight(self) -> float:
        """Codes, a float16 scale and a zero point per group, as every layout stores them."""
        return self.bits + (16 + self.bits) / self.group_size

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> AffineParams:
        """Scale and zero, each `[rows]`, for `weight [rows, group_size]` (float32).

        `importance` broadcasts to weight's shape: the cost of a squared error in each place.
        """
        if not self.search:
            return self._stored(*self._range(weight, 1.0))
        if importance is None:
            importance = torch.ones((), device=weight.device)
        importance = importance.expand_as(weight)
        step = max(1, CHUNK // weight.shape[1])
        parts = [
            self._search(part, weights)
            for part, weights in zip(weight.split(step), importance.split(step), strict=True)
        ]
        scale, zero = (torch.cat(side) for side in zip(*parts, strict=True))
        return self._stored(scale, zero)

    def _range(self, weight: Tensor, shrink: float) -> tuple[Tensor, Tensor]:
        """Scale and zero that cover `shrink` of each row's range (zero always representable)."""
        low = weight.amin(1).clamp_(max=0) * shrink
        high = weight.amax(1).clamp_(min=0) * shrink
        if self.symmetric:
            half = torch.maximum(-low, high)
            return half * 2 / self.max_code, torch.full_like(half, 2 ** (self.bits - 1))
        scale = (high - low) / self.max_code
        zero = torch.round(-low / scale.clamp(min=SCALE_MIN))
        return scale, zero.clamp_(self.zero_min, self.max_code)

    def _search(self, weight: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
        """The best of `SHRINK`, once more from its own scale; the full range where that is better still."""
        full = self._range(weight, 1.0)
        scale, zero = full
        best = torch.full_like(scale, -torch.inf)
        weighted = importance * weight
        for shrink in SHRINK.tolist():
            candidate, candidate_zero = self._range(weight, shrink)
            gain, fitted = self._gain(weight, weighted, importance, candidate, candidate_zero)
            better = gain > best * (1 + 2.0**-20)  # codes twice as large are no better: keep the first
            best = torch.where(better, gain, best)
            scale = torch.where(better, fitted, scale)
            zero = torch.where(better, candidate_zero, zero)
        _, scale = self._gain(weight, weighted, importance, scale, zero)
        searched, covering = self._stored(scale, zero), self._stored(*full)
        worse = self._error(weight, importance, searched) > self._error(weight, importance, covering)
        return torch.where(worse, full[0], scale), torch.where(worse, full[1], zero)

    def _gain(
        self, weight: Tensor, weighted: Tensor, importance: Tensor, scale: Tensor, zero: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What rounding on `scale` explains, (Σ h w c)² / Σ h c², and the best scale for its codes."""
        codes = (weight / scale.clamp(min=SCALE_MIN)[:, None]).round_()
        codes.clamp_(-zero[:, None], (self.max_code - zero)[:, None])  # code - zero
        along = (weighted * codes).sum(1)
        power = (importance * codes.square_()).sum(1).clamp_(min=torch.finfo(codes.dtype).tiny)
        fitted = torch.where(along > 0, along / power, scale)
        return torch.where(along > 0, along * along / power, 0.0), fitted

    def _error(self, weight: Tensor, importance: Tensor, params: AffineParams) -> Tensor:
        """Σ h (w - ŵ)² of each row."""
        codes = (weight / params.scale[:, None]).round_()
        codes.clamp_(-params.zero[:, None], (self.max_code - params.zero)[:, None])
        return (importance * codes.mul_(params.scale[:, None]).sub_(weight).square_()).sum(1)

    def _stored(self, scale: Tensor, zero: Tensor) -> AffineParams:
        """Round scales to float16; an all-zero group gets scale 1 (any would do)."""
        scale = torch.where(scale == 0, 1.0, scale.clamp(SCALE_MIN, SCALE_MAX))
        return AffineParams(scale.half().float(), zero)

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
        codes = (column / params.scale).round_().add_(params.zero).clamp_(0, self.max_code)
        return codes, (codes - params.zero).mul_(params.scale)

    def decode(self, codes: Tensor, params: AffineParams) -> Tensor:
        """Values, float32 `[rows, group_size]`."""
        return (codes.float() - params.zero[:, None]) * params.scale[:, None]

    def scaled(self, params: AffineParams, factor: Tensor) -> AffineParams:
        """Scales times `factor [rows]`, rounded to float16."""
        return self._stored(params.scale * factor, params.zero)

    def join(self, params: Sequence[AffineParams]) -> AffineParams:
        """`[out, groups]` from one `[out]` per group, in order."""
        scales, zeros = [part.scale for part in params], [part.zero for part in params]
        return AffineParams(torch.stack(scales, 1), torch.stack(zeros, 1))

    def rows(self, params: AffineParams, rows: slice) -> AffineParams:
        """The parameters of some rows of a matrix."""
        return AffineParams(params.scale[rows], params.zero[rows])

    def decode_matrix(self, codes: Tensor, params: AffineParams, column_group: Tensor) -> Tensor:
        """Values, float32 `[out, in]`."""
        zero, scale = params.zero[:, column_group], params.scale[:, column_group]
        return (codes.float() - zero) * scale
