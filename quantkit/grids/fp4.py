"""4-bit floats (e2m1) of which 16 or 32 share a scale: NVFP4 and MXFP4.

A code is a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
MXFP4: `w = 2^e * value`, a power of two for 32 weights (OCP Microscaling Formats 1.0, sections 5.3.3, 5.4.1).
NVFP4: `w = scale / divisor * value`, an e4m3 scale for 16 weights and one divisor per matrix, which moves the
scales to where e4m3 has full precision (NVIDIA 2025, arXiv:2509.25149, appendix A).

The largest weight of a group need not become 6. Between 4 and 6 the values are far apart, so the error may be
lower if the largest weight becomes 4 (Four over Six, arXiv:2512.02010) or is cut off. All e4m3 scales around
`largest / 6` are tried (as in ScaleSweep, arXiv:2606.07618); the one with the least squared error, weighted
by importance, is used. For a power of two there are three candidates.

Divisors are powers of two here, which costs no precision because scales are floats. A decoded weight then has
five significant bits, so bfloat16 holds it exactly, whatever dtype the client computes in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, Params, each_row
from quantkit.grids.levels import TableLevels, constant
from quantkit.grids.parallel import for_each, rows_at_once

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*MAGNITUDES, *(-value for value in MAGNITUDES))  # by code; code 8 is a second zero
LARGEST_FP4 = MAGNITUDES[-1]
UNITS = 4  # steps in a scale: midpoints between values are whole numbers
SIGN = 8  # bit of a code
POWERS_OF_TWO = "its scales are powers of two, too far apart to be trained"

FLOAT8 = torch.float8_e4m3fn
LARGEST_FLOAT8 = 448.0
E4M3_MIN = 2.0**-9  # smallest above 0 (subnormal)
# Scales of the largest weights are at most that: half as much again also fits, and ggml's own encoder takes
# what is above 256 for the largest scale there is.
E4M3_TOP = 240.0
CODES_BELOW, CODES_ABOVE = 2, 6  # neighbours in e4m3 of `largest / 6` that are tried: 4/5 to 7/4 of it
MX_BIAS, MX_BLOCK = 127, 32
MX_LIMITS = -126, 127  # 2^-127 is read, but no normal float32


@dataclass(frozen=True)
class Fp4Params:
    """scale: float32, a storable value, `[rows]` for one group or `[out, groups]` for a matrix. divisor: of
    the scale, in the same shape; 1 for MXFP4."""

    scale: Tensor
    divisor: Tensor

    @property
    def step(self) -> Tensor:
        """The weight that corresponds to the value 1."""
        return self.scale / self.divisor


class Fp4Levels(TableLevels):
    """Levels of error feedback: the values of e2m1 in UNITS. Codes are the bits of e2m1;
    ties go away from zero."""

    level_table = tuple(UNITS * value for value in VALUES)


@dataclass(frozen=True)
class Fp4Grid(Fp4Levels):
    """Base of MXFP4 and NVFP4. search: try other scales than the one that fits the largest weight.

    A subclass defines `_candidates(largest)`, which returns scales `[candidates, rows]` for groups whose
    largest weights, times the divisor, are `largest [rows]`, first the best one without search; and
    `_storable(scale)`, which returns the nearest storable scale above 0.
    """

    search: bool = True
    divisor = 1.0  # of the scales
    bits = 4
    many = True

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Fp4Params:
        cost = None if importance is None else each_row(importance, len(weight)).t()
        return self.fit_columns(weight.t().contiguous(), cost)

    def fit_columns(self, columns: Tensor, importance: Tensor | None = None) -> Fp4Params:
        """Return `fit` for groups `columns [group_size, rows]`; `importance` may have this shape too."""
        divisor = self.together([columns]).divisor
        candidates = self._candidates(columns.abs().amax(0).mul_(divisor))
        scale = candidates[0].clone()
        if self.search:
            rows = rows_at_once(columns.device, len(columns) * len(candidates), 4)
            weights = columns.new_ones(len(columns)) if importance is None else importance
            weights = weights.view(len(columns), -1).expand_as(columns)
            parts = (part.split(rows, -1) for part in (columns, candidates, weights, scale))
            for_each(lambda *piece: self._best(*piece, divisor), list(zip(*parts, strict=True)))
        return Fp4Params(scale, torch.full_like(scale, divisor))

    def _best(self, x: Tensor, candidates: Tensor, weights: Tensor, out: Tensor, divisor: float) -> None:
        """Write into `out` the scales of least error among `candidates [candidates, rows]`, for groups
        `x [group_size, rows]` with error weights of that shape."""
        step = candidates[:, None] / (divisor * UNITS)
        levels = x / step
        self.snap(levels, levels)
        lost = levels.mul_(step).sub_(x).square_().mul_(weights).sum(1)
        out.copy_(candidates.gather(0, lost.argmin(0, keepdim=True))[0])

    def steps(self, params: Fp4Params) -> tuple[Tensor, Tensor]:
        step = params.step / UNITS
        return step[None], torch.zeros_like(step)[None]

    def scaled(self, params: Fp4Params, factor: Tensor) -> Fp4Params:
        return replace(params, scale=self._storable(params.scale * factor))


@dataclass(frozen=True)
class MxFp4Grid(Fp4Grid):
    """Groups of 32 weights that share a power of two."""

    group_size = MX_BLOCK
    label = "mxfp4, groups of 32"
    untrained = POWERS_OF_TWO, "compress the teacher in another format, such as nvfp4"

    def _candidates(self, largest: Tensor) -> Tensor:
        """Return the scale of the specification: the largest weight becomes 4 to 8 and may be cut off. With
        search, also half and twice that scale."""
        exponent = torch.frexp(largest).exponent - 3  # floor(log2) - 2
        exponent = torch.where(largest > 0, exponent, 0)
        steps = constant((0, -1, 1) if self.search else (0,), largest.device, torch.int16)
        return powers_of_two((exponent + steps[:, None]).clamp_(*MX_LIMITS))

    def _storable(self, scale: Tensor) -> Tensor:
        return mx_scale(scale, 0, 1.5)


class Divided(Grid):
    """Grids whose scales have one divisor. divisor: of all matrices; None: each matrix has its own. Linears
    that engines fuse need the same divisor (`together`)."""

    divisor: float | None

    @property
    def spans_matrix(self) -> bool:
        return self.divisor is None

    joint = spans_matrix

    def together(self, weights: Sequence[Tensor]) -> Self:
        if self.divisor is not None:
            return self
        largest = max(float(torch.stack(weight.aminmax()).abs().max()) for weight in weights)
        return replace(self, divisor=divisor_of(largest))

    def fit_matrix(self, weight: Tensor, importance: Tensor | None = None) -> Params:
        return super(Divided, self.together([weight])).fit_matrix(weight, importance)


@dataclass(frozen=True)
class NvFp4Grid(Divided, Fp4Grid):
    """Groups of 16 weights that share an e4m3 scale."""

    divisor: float | None = None
    group_size = 16
    label = "nvfp4, groups of 16"
    floating = ("scale",)  # before the division by the divisor

    def _candidates(self, largest: Tensor) -> Tensor:
        first = self._storable(largest / LARGEST_FP4).to(FLOAT8).view(torch.uint8).short()
        around = range(-CODES_BELOW, CODES_ABOVE + 1) if self.search else range(1)
        steps = constant(tuple(sorted(around, key=abs)), largest.device, torch.int16)
        codes = (first + steps[:, None]).clamp_(1, 0x7E)  # in e4m3 larger codes are larger numbers
        return codes.to(torch.uint8).view(FLOAT8).float()

    def _storable(self, scale: Tensor) -> Tensor:
        return scale.clamp(E4M3_MIN, LARGEST_FLOAT8).to(FLOAT8).float()

    def clipped(self, params: Fp4Params) -> int:
        return int((params.scale >= LARGEST_FLOAT8).sum())


def mx_scale(largest: Tensor, top: int, limit: float = 1.75) -> Tensor:
    """Return the powers of two by which `largest` becomes `limit` * 2^top or at least half of that. 1.75 as
    in compressed-tensors 0.20 `quantization/utils/mxfp_utils.py: generate_mx_scales`."""
    mantissa, exponent = torch.frexp(largest.float())  # mantissa from 1/2 to 1
    exponent = (exponent - 1 - top + (mantissa >= limit / 2).int()).clamp_(*MX_LIMITS)
    scale = powers_of_two(exponent).to(largest.dtype)
    return torch.where(scale == 0, 1.0, scale)  # float16 has no numbers below 2^-24


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2^exponents, float32."""
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents)


def divisor_of(largest: float) -> float:
    """Return the divisor, a power of two, for a matrix whose largest weight is `largest`."""
    if not 0 < largest < torch.inf:
        return 1.0
    _, exponent = torch.frexp(torch.tensor(E4M3_TOP * LARGEST_FP4 / largest))
    return 2.0 ** max(-100, min(int(exponent) - 1, 100))


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return gpt-oss's experts, decoded exactly to bfloat16 `[..., groups * 32]`. blocks: uint8
    `[..., groups, 16]`, the first of two codes in the low bits; scales: exponents, uint8 `[..., groups]`."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - MX_BIAS
    values = constant(VALUES, blocks.device)[codes.long()]
    return torch.ldexp(values, exponents).flatten(-2).to(torch.bfloat16)
