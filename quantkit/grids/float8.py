"""8-bit floats: e4m3 of the OCP 8-bit Floating Point Specification (OFP8) 1.0, section 5, without infinities.

`w = scale * float8(code)`; codes are the stored bytes. A scale belongs to a group of columns (a whole row, or
the columns of a square block) in one row, or in all rows of a square block, for which it is repeated. Formats
of serving engines: Micikevicius et al. 2022, arXiv:2209.05433; blocks: DeepSeek-V3, arXiv:2412.19437, 3.3.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.grids.fp4 import FLOAT8, LARGEST_FLOAT8, MX_BLOCK, MxFp4Grid, mx_scale
from quantkit.grids.grid import Grid, by_rows, matrix

TOP = 8  # floor of the binary logarithm of LARGEST_FLOAT8
SMALLEST_NORMAL = 2.0**-6  # that is normal: below, levels lie as far apart as there
NAN, UPPER_EXPONENT = 0x7F, 0x4000  # a byte without its sign; the first bit of a float16's exponent
WHOLE = 1 << 31  # more rows than a matrix has: all of them share a scale
# Factors of a scale; twice the scale has the same levels, one exponent lower.
STRETCHES = tuple(1 + k / 16 for k in range(16))
EXPONENT, SHIFT, HALF = 0x7F800000, 20 << 23, 0x400000  # bits of a float32; 20 of its 23 digits are cut off


@dataclass(frozen=True)
class Float8Params:
    """scale: float32, `[rows]` for one group or `[out, groups]` for a matrix."""

    scale: Tensor


@dataclass(frozen=True)
class Float8Grid(Grid):
    """The 254 finite values of e4m3, times a scale.

    rows: number of rows that share a scale; WHOLE for all. search: try scales by which the largest weight
    becomes 448 or less, and use the one with the least error. scale_dtype: dtype in which scales are stored.
    scale: of all matrices; None: each has its own. Linears that engines fuse share that of WHOLE matrices.
    """

    group_size: int
    rows: int = 1
    search: bool = False
    scale_dtype: str = "bfloat16"
    scale: float | None = None
    bits = 8
    label = "float8 e4m3"

    @property
    def stored(self) -> torch.dtype:
        """`scale_dtype` as a torch.dtype."""
        return getattr(torch, self.scale_dtype)

    @property
    def spans_matrix(self) -> bool:
        return self.rows > 1

    @property
    def joint(self) -> bool:
        return self.rows == WHOLE and self.scale is None

    def together(self, weights: Sequence[Tensor]) -> Self:
        if not self.joint:
            return self
        return replace(self, scale=float(self.fit_matrix(torch.cat(tuple(weights))).scale[0, 0]))

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Float8Params:
        if not self.search:
            peak = by_rows(lambda rows: rows.abs().amax(1), weight.new_empty(len(weight)), weight)
            return Float8Params(self._scale(peak))
        scale = weight.new_empty(len(weight))
        return Float8Params(by_rows(lambda rows: self._searched(rows[:, None], importance), scale, weight))

    def fit_matrix(self, weight: Tensor, importance: Tensor | None = None) -> Float8Params:
        """Return scales `[out, groups]` for `weight [out, in]`; the rows of a block have the same scale."""
        if self.scale is not None:
            return Float8Params(weight.new_full((len(weight), 1), self.scale))
        if self.rows == 1:
            return matrix(self.fit(weight.reshape(-1, self.group_size)), len(weight))
        rows = min(self.rows, len(weight))
        blocks = pad(weight, (0, 0, 0, -len(weight) % rows)).unflatten(0, (-1, rows))
        blocks = blocks.unflatten(2, (-1, self.group_size)).transpose(1, 2)  # [.., groups, rows, columns]
        if self.search:
            scale = torch.stack([self._searched(groups, None) for groups in blocks])
        else:
            scale = self._scale(blocks.abs().amax((2, 3)))
        return Float8Params(self._over_rows(scale, len(weight)))

    def _over_rows(self, scale: Tensor, out_features: int) -> Tensor:
        """Return the scales of blocks, repeated for each of their rows."""
        return scale.repeat_interleave(min(self.rows, out_features), 0)[:out_features]

    def _scale(self, peak: Tensor) -> Tensor:
        """Return the stored scale by which `peak` becomes 448; epsilon for a peak of 0."""
        scale = self._storable(peak / LARGEST_FLOAT8)
        return torch.where(scale == 0, torch.finfo(self.stored).eps, scale)

    def _storable(self, scale: Tensor) -> Tensor:
        return scale.to(self.stored).float()

    def _searched(self, blocks: Tensor, importance: Tensor | None) -> Tensor:
        """Return the scales `[n]` with the least squared error for `blocks [n, rows, columns]`."""
        base = self._scale(blocks.abs().amax((1, 2)))
        best, least = base, torch.full_like(base, torch.inf)
        for stretch in STRETCHES:
            scale = self._storable(base * stretch)
            missed = nearest(blocks / scale[:, None, None]).mul_(scale[:, None, None]).sub_(blocks).square_()
            missed = (missed if importance is None else missed.mul_(importance)).sum((1, 2))
            better = missed < least
            best, least = torch.where(better, scale, best), torch.where(better, missed, least)
        return best

    def nearest(self, weight: Tensor, params: Float8Params) -> Tensor:
        def work(rows: Tensor, scale: Tensor) -> Tensor:
            return nearest(rows / scale[:, None]).mul_(scale[:, None])

        return by_rows(work, weight, weight, params.scale)

    def steps(self, params: Float8Params) -> tuple[Tensor, Tensor]:
        return params.scale[None], torch.zeros_like(params.scale)[None]

    def snap(self, target: Tensor, out: Tensor) -> None:
        out.copy_(nearest(target))

    def levels(self, codes: Tensor) -> Tensor:
        return from_float8(codes)

    def codes(self, levels: Tensor, out: Tensor) -> None:
        out.copy_(to_float8(levels).view(torch.uint8))

    def scaled(self, params: Float8Params, factor: Tensor) -> Float8Params:
        """Return scales times `factor [rows]`; unchanged if the rows of a block share a scale."""
        if self.rows > 1:
            return params
        return Float8Params(self._storable(params.scale * factor))

    def floats(self, params: Float8Params) -> dict[str, Tensor]:
        """Return the scales `[out / rows, groups]`."""
        return {"scale": params.scale[:: self.rows]}

    def with_floats(self, params: Float8Params, floats: Mapping[str, Tensor]) -> Float8Params:
        return Float8Params(self._over_rows(floats["scale"], len(params.scale)))

    def describe(self) -> str:
        """Return `float8 e4m3, groups of 768`, or `blocks of 128 × 128` if rows share a scale."""
        if 1 < self.rows < WHOLE:
            return f"{self.label}, blocks of {self.rows} × {self.group_size}"
        return f"{self.label}, groups of {self.group_size}"


@dataclass(frozen=True)
class MxFp8Grid(Float8Grid):
    """MXFP8: groups of 32 that share a power of two (OCP Microscaling Formats 1.0, section 5.3.1). No
    search: half the scale cuts the largest weight off, twice the scale adds no precision."""

    group_size: int = MX_BLOCK
    label = "mxfp8"
    floats, untrained, _storable = Grid.floats, MxFp4Grid.untrained, MxFp4Grid._storable

    def _scale(self, peak: Tensor) -> Tensor:
        return mx_scale(peak, TOP)


def to_float8(values: Tensor) -> Tensor:
    """Return the nearest values of e4m3, ties to even; values beyond the largest become the largest."""
    return values.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8)


def from_float8(codes: Tensor) -> Tensor:
    """Return the values of bytes, float32. On a CPU this takes a fifth of torch's time: the bits of e4m3 are
    the upper bits of a float16 with an exponent larger by 8. Codes of NaN are decoded by torch."""
    if codes.device.type != "cpu" or not codes.numel() or (codes & 127).amax() == NAN:
        return codes.view(FLOAT8).float()
    halves = (codes.view(torch.int8).short() << 7).bitwise_and_(~UPPER_EXPONENT)
    return halves.view(torch.float16).float().mul_(256)


def nearest(values: Tensor) -> Tensor:
    """Return the nearest values of e4m3 in float32. On a CPU this is faster than two conversions: adding a
    number 2^20 times as large leaves three binary digits after the first."""
    values = values.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
    large = ((values.abs().clamp_(min=SMALLEST_NORMAL).view(torch.int32) & EXPONENT) + SHIFT | HALF).view(
        torch.float32
    )
    return values.add_(large).sub_(large)
