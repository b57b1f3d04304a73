"""Affine integer grid: `w = scale * (code - zero)`, code in 0 .. 2^bits - 1, one (scale, zero) per group.

Scales are rounded to float16, as stored, before weights are rounded with them.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quantkit.grids.grid import each_row
from quantkit.grids.levels import HALF_MAX, HALF_MIN, WholeLevels
from quantkit.grids.parallel import for_each, rows_at_once

STEP = {2: 0.06, 3: 0.05, 4: 0.04, 5: 0.03, 6: 0.02, 7: 0.01, 8: 0.006}  # share of the range, by bits
RANGES = (-2, 0, 3, 6, 9)  # steps by which the group's full range is made smaller; then one either way
SEARCH_SPAN = 32  # pieces of the search that share their memory: fresh pages cost more than the arithmetic
TEMPORARIES = 2 * len(RANGES)  # the candidates of a stage are tried together


@dataclass(frozen=True)
class AffineParams:
    """scale, zero: float32, `[rows]` for one group or `[out, groups]` for a matrix.

    Scales are float16 values, zeros are integers in 0 .. 2^bits - 1.
    """

    scale: Tensor
    zero: Tensor


@dataclass(frozen=True)
class AffineGrid(WholeLevels):
    """bits: 2 to 8. symmetric: zero is fixed at 2^(bits-1). zero_min: smallest zero that a layout can store.
    signed: a symmetric grid's scale may be negative. The levels reach one step further below zero than above,
    and a negative scale gives this step to the side whose large weights cost more. At 4 bits the squared
    error is a tenth smaller, at 2 and 3 bits a seventh.

    search: where importance is known, choose each group's range by the least weighted squared rounding
    error. For each candidate the codes are rounded; the best scale for them is s = Σ h w c / Σ h c² with
    c = code - zero. It lowers the error Σ h w² by (Σ h w c)² / Σ h c². First RANGES are tried, then both
    neighbours of the best. Otherwise the largest weight is covered: a search without importance clips large
    weights, which real models need (SmolLM2 then loses half as much again). clip: see Grid.
    """

    bits: int
    group_size: int
    symmetric: bool = True
    zero_min: int = 0
    search: bool = True
    clip: bool = False
    signed: bool = False
    many = True
    floating = ("scale",)  # zero points are stored as integers

    @property
    def max_code(self) -> int:
        return 2**self.bits - 1

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> AffineParams:
        weight = weight.contiguous()
        scale, zero = self._range(weight.amin(1).clamp_(max=0), weight.amax(1).clamp_(min=0))
        scale = self._storable(scale)
        if self.search and importance is not None:  # in units of the full range's scale
            rows = SEARCH_SPAN * rows_at_once(weight.device, weight.shape[1], TEMPORARIES)
            # importance: one for all rows, or one for each matrix
            tensors = [scale, zero, weight, each_row(importance.sqrt(), len(weight))]
            for_each(self._search, list(zip(*(tensor.split(rows) for tensor in tensors), strict=True)))
        return AffineParams(self._storable(scale).float(), zero)

    def describe(self) -> str:
        return f"{self.bits} bit, groups of {self.group_size}"

    def _range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero that cover the range from `low` <= 0 to `high` >= 0."""
        if self.symmetric:
            half = torch.maximum(-low, high)
            scale = half * 2 / (self.max_code + self.signed)
            scale = torch.where(high > -low, -scale, scale) if self.signed else scale
            return scale, torch.full_like(half, 2 ** (self.bits - 1))
        scale = (high - low) / self.max_code
        zero = torch.round(-low / scale.clamp(min=HALF_MIN))
        return scale, zero.clamp_(self.zero_min, self.max_code)

    def _search(self, scale: Tensor, zero: Tensor, weight: Tensor, roots: Tensor) -> None:
        """Replace the full range's `scale [rows]` by the best for `weight [rows, group_size]`, in place.

        The result is never worse than the full range of its sign, one of RANGES: the float16 scale nearest to
        the best has the least error for given codes, and rounding again can only lower the error.
        """
        rows = rows_at_once(weight.device, weight.shape[1], TEMPORARIES)
        space = weight.new_empty(TEMPORARIES + 2, min(rows, len(weight)), weight.shape[1])
        for start in range(0, len(weight), rows):
            part = slice(start, start + rows)
            x, weighted, *buffers = space[:, : len(weight[part])].split((1, 1, len(RANGES), len(RANGES)))
            x, weighted, root = x[0], weighted[0], roots[part]
            torch.div(weight[part], scale[part, None], out=x)
            if self.symmetric and self.signed:
                sign = self._sign(x, root, weighted)
                scale[part] *= sign
                x.mul_(sign[:, None])
            torch.mul(x, root, out=weighted)
            scale[part] *= self._best(x, weighted, zero[part], root, buffers)

    def _sign(self, x: Tensor, root: Tensor, buffer: Tensor) -> Tensor:
        """Return the better sign of each group's scale, 1 or -1, by the sign of `Σ h x^(2^bits + 1)`. With
        more bits fewer weights are beyond the shorter side's last level, so the power is higher."""
        torch.mul(x, 2.0 ** (1 - self.bits), out=buffer)  # within ±1
        for _ in range(self.bits):
            buffer.square_()
        return torch.where(buffer.mul_(x).mul_(root).mul_(root).sum(1) > 0, -1.0, 1.0)

    def _best(self, x: Tensor, weighted: Tensor, zero: Tensor, root: Tensor, buffers: list[Tensor]) -> Tensor:
        """Return the best scale for groups `x [rows, group_size]`. root: of the importance, in this shape, a
        factor of `weighted` and of the codes."""
        stages = _candidates(self.bits, x.dtype, x.device)
        gains, scales, ranges = x.new_empty(3, sum(map(len, stages)), len(x))
        best, done = 0, 0
        for stage in stages:
            tried = slice(done, done := done + len(stage))
            steps, product = (buffer[: len(stage)] for buffer in buffers)
            ranges[tried] = stage + best
            # all candidates of a stage in the same passes
            torch.mul(x, ranges[tried].reciprocal()[..., None], out=steps)
            self._clamp(steps.round_(), zero).mul_(root)
            along = torch.mul(steps, weighted, out=product).sum(2)
            power = torch.linalg.vector_norm(steps, dim=2).square_().clamp_(min=torch.finfo(x.dtype).tiny)
            torch.div(along, power, out=scales[tried])
            torch.mul(along, scales[tried], out=gains[tried])
            index = gains[:done].max(0, keepdim=True).indices
            best = ranges.gather(0, index)
        scale = scales.gather(0, index)[0]
        return torch.where(scale > 0, scale, 1)

    def _clamp(self, steps: Tensor, zero: Tensor) -> Tensor:
        """Clamp code - zero, `[..., rows, group_size]`, so that codes are valid, in place."""
        if self.symmetric:
            half = 2 ** (self.bits - 1)
            return steps.clamp_(-half, self.max_code - half)
        lowest = -zero[:, None]  # two passes, which are faster than clamp_ with tensors
        torch.maximum(steps, lowest, out=steps)
        return torch.minimum(steps, lowest + self.max_code, out=steps)

    def clipped(self, params: AffineParams) -> int:
        size = params.scale.abs()
        return int(((size <= HALF_MIN) | (size >= HALF_MAX)).sum())

    def round(self, weight: Tensor, params: AffineParams) -> Tensor:
        """Return the nearest codes, uint8, for `weight [rows, group_size]`; ties go to even."""
        codes = (weight / params.scale[:, None]).round_().add_(params.zero[:, None])
        return codes.clamp_(0, self.max_code).to(torch.uint8)

    def steps(self, params: AffineParams) -> tuple[Tensor, Tensor]:
        return params.scale[None], (params.scale * params.zero)[None]

    def decode(self, codes: Tensor, params: AffineParams) -> Tensor:
        return (codes.float() - params.zero[:, None]) * params.scale[:, None]

    def nearest(self, weight: Tensor, params: AffineParams) -> Tensor:
        """Replace `weight [rows, group_size]` by `decode(round(weight, params), params)`; return it."""
        scale = params.scale[:, None]
        return self._clamp(weight.div_(scale).round_(), params.zero).mul_(scale)

    def scaled(self, params: AffineParams, factor: Tensor) -> AffineParams:
        return AffineParams(self._storable(params.scale * factor), params.zero)

    def _storable(self, scale: Tensor) -> Tensor:
        """Return the nearest float16 scale of the same sign within its range; 1 for an all-zero group."""
        clamped = scale.abs().clamp_(HALF_MIN, HALF_MAX).copysign_(scale)
        return torch.where(scale == 0, 1.0, clamped).half().to(scale.dtype)


@cache
def _candidates(bits: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return shares of the full range, then offsets from the best share, `[candidates, 1]` each."""
    step = STEP[bits]
    stages = [1 - k * step for k in RANGES], [step, -step]
    return tuple(torch.tensor(stage, dtype=dtype)[:, None].to(device) for stage in stages)
