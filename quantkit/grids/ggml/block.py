"""What ggml's block types share: parameters as they are stored, rounding on them, the walk over a matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from quantkit.grids.ggml import fast, search
from quantkit.grids.grid import by_rows, group, matrix, stack
from quantkit.grids.levels import WholeLevels, usable
from quantkit.grids.parallel import elements_at_once, for_each

T = TypeVar("T")
HALF_MAX = 65504.0
HALF_MIN = 2.0**-24  # smallest positive float16 (subnormal)


@dataclass(frozen=True)
class Scale:
    """d: float16 values in float32, `[rows]` for one block or `[out, blocks]` for a matrix."""

    d: Tensor

    def sub_block(self, k: int | slice) -> tuple[Tensor, Tensor | None]:
        """Step between neighbouring values and what is subtracted from them (None: nothing), of
        sub-block k `[rows]`, or of several `[rows, sub-blocks]`."""
        return self.d[..., None][..., k], None


@dataclass(frozen=True)
class ScaleAndMin:
    """d, m: as above; m is added to every value."""

    d: Tensor
    m: Tensor

    def sub_block(self, k: int | slice) -> tuple[Tensor, Tensor | None]:
        return self.d[..., None][..., k], -self.m[..., None][..., k]


@dataclass(frozen=True)
class SubScales:
    """d: as above. scales: signed integers in float32, `[..., sub-blocks]`. The step is their product."""

    d: Tensor
    scales: Tensor

    def sub_block(self, k: int | slice) -> tuple[Tensor, Tensor | None]:
        return _product(self.d, self.scales, k), None


@dataclass(frozen=True)
class SubScalesAndMins:
    """d, dmin: as above. scales, mins: unsigned integers in float32, `[..., sub-blocks]`; dmin times
    a sub-block's min is subtracted from its values."""

    d: Tensor
    dmin: Tensor
    scales: Tensor
    mins: Tensor

    def sub_block(self, k: int | slice) -> tuple[Tensor, Tensor | None]:
        return _product(self.d, self.scales, k), _product(self.dmin, self.mins, k)


def _product(unit: Tensor, multiples: Tensor, k: int | slice) -> Tensor:
    return multiples[..., k] * (unit if isinstance(k, int) else unit[..., None])


@dataclass(frozen=True)
class Blocks:
    """Blocks on their way through an encoder, each a column, so that a pass over memory serves them all.

    x: float32 `[group_size, blocks]`, row by row of the matrix. importance: the same shape, or None.
    per_row: blocks in a row of the matrix.
    """

    x: Tensor
    importance: Tensor | None
    per_row: int


def split(x: Tensor, size: int) -> Tensor:
    """`[group_size, blocks]` to `[size, sub-blocks * blocks]`: sub-blocks of `size` weights as columns."""
    return x.unflatten(0, (-1, size)).transpose(0, 1).reshape(size, -1)


def join(x: Tensor, blocks: int) -> Tensor:
    """Inverse of `split`."""
    return x.unflatten(1, (-1, blocks)).transpose(0, 1).reshape(-1, blocks)


def by_chunks(work: Callable[[slice], T], weight: Tensor) -> list[T]:
    """`work` on the rows of `weight [rows, in]`, a cacheful or all at a time, in order.

    On a CPU torch's threads each take chunks, instead of sharing in every one of a thousand short passes.
    """
    rows = max(1, elements_at_once(weight.device) // max(1, weight.shape[1]))
    parts = [slice(start, start + rows) for start in range(0, len(weight), rows)]
    found: list = [None] * len(parts)

    def put(place: int) -> None:
        found[place] = work(parts[place])

    for_each(put, [(place,) for place in range(len(parts))])
    return found


@dataclass(frozen=True)
class BlockGrid(WholeLevels):
    """A ggml type: sub-blocks of `sub_size` weights, values `step * (code - offset) - low`, codes of `bits`
    bits. exact: search as ggml does, to the bit, or faster.
    """

    name: str
    bits: int
    group_size: int
    sub_size: int
    offset: int = 0
    exact: bool = True
    spans_matrix = False
    weighted = True
    clip = False

    @property
    def _search(self) -> ModuleType:
        return search if self.exact else fast

    def _encode(self, blocks: Blocks) -> tuple[Any, Tensor]:
        """Parameters, blocks first, and codes `[group_size, blocks]`."""
        raise NotImplementedError

    def _level(self, codes: Tensor) -> Tensor:
        """What codes (float32) are multiplied with: `value = step * level - low`."""
        return codes - self.offset

    def _nearest(self, level: Tensor) -> Tensor:
        """Codes (float32) of the nearest levels; `level` is used up."""
        return level.round_().add_(self.offset).clamp_(0, 2**self.bits - 1)

    def quantize(self, weight: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Any]:
        """Codes uint8 `[out, in]` and parameters `[out, in / group_size]` for `weight [out, in]` (float32),
        byte for byte ggml's where `exact` (quantize_row_*_ref, and *_impl with importance).

        importance: `[in]` or `[out, in]`, what a squared error costs in each column; llama.cpp's imatrix.
        """
        codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
        if importance is not None:
            importance = importance.expand_as(weight)

        def encode(part: slice) -> Any:
            blocks = Blocks(
                self._columns(weight[part]),
                None if importance is None else self._columns(importance[part]),
                weight.shape[1] // self.group_size,
            )
            params, chosen = self._encode(blocks)
            codes[part].view(-1, self.group_size).copy_(chosen.to(torch.uint8).t())
            return params

        return codes, matrix(stack(by_chunks(encode, weight)), len(weight))

    def _columns(self, weight: Tensor) -> Tensor:
        return weight.reshape(-1, self.group_size).t().contiguous()

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Any:
        """Parameters for blocks `weight [rows, group_size]`, found as ggml does; every block is taken
        for a row of its own where ggml looks at the mean square of a row."""
        return group(self.fit_matrix(weight, importance), 0)

    def fit_matrix(self, weight: Tensor, importance: Tensor | None = None) -> Any:
        """Parameters `[out, groups]` for `weight [out, in]`."""
        return self.quantize(weight, importance)[1]

    def plain(self) -> BlockGrid:
        """Itself: ggml has no encoder without a search."""
        return self

    def describe(self) -> str:
        """`Q4_K, blocks of 256`."""
        return f"{self.name}, blocks of {self.group_size}"

    def round(self, weight: Tensor, params: Any) -> Tensor:
        """Codes of the nearest values, uint8 `[rows, group_size]`."""
        codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)

        def work(rows: Tensor, step: Tensor, low: Tensor) -> Tensor:
            level = (rows.unflatten(1, (-1, self.sub_size)) + low[..., None]) / step[..., None]
            return self._nearest(level).flatten(1)

        step, low = self._steps(params)
        return by_rows(work, codes, weight, divisor(step), low)

    def steps(self, params: Any) -> tuple[Tensor, Tensor]:
        """Step, and what is subtracted from its multiples by a code, `[sub-blocks, rows]`."""
        return self.in_levels(*(part.t() for part in self._steps(params)))

    def in_levels(self, step: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        """The same for values `step * (code - offset) - low`."""
        return usable(step), low + step * self.offset

    def refit(self, weight: Tensor, params: Any, k: int, importance: Tensor) -> Any:
        """Parameters whose sub-block k suits `weight [sub_size, rows]`; the others stay."""
        from quantkit.grids.ggml.refit import refit

        return refit(self, weight, params, k, importance)

    def decode(self, codes: Tensor, params: Any) -> Tensor:
        """Values, float32 `[rows, group_size]`, bit for bit ggml's (dequantize_row_*)."""
        values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)

        def work(rows: Tensor, step: Tensor, low: Tensor) -> Tensor:
            level = self._level(rows.float()).unflatten(1, (-1, self.sub_size))
            return level.mul_(step[..., None]).sub_(low[..., None]).flatten(1)

        return by_rows(work, values, codes, *self._steps(params))

    def _steps(self, params: Any) -> tuple[Tensor, Tensor]:
        """Step and low of every sub-block, `[rows, sub-blocks]`."""
        step, low = params.sub_block(slice(None))
        return step, step.new_zeros(step.shape) if low is None else low

    def nearest(self, weight: Tensor, params: Any) -> Tensor:
        """`decode(round(weight, params), params)`."""
        return self.decode(self.round(weight, params), params)

    def scaled(self, params: Any, factor: Tensor) -> Any:
        """d, dmin and m times `factor [rows]`, rounded to float16."""
        return replace(params, **{name: half(part * factor) for name, part in _halves(params)})

    def clipped(self, params: Any) -> int:
        """How many scales lie at the end of float16's range, where weights may be lost."""
        return sum(
            int(((part.abs() >= HALF_MAX) | (part.abs() == HALF_MIN)).sum()) for _, part in _halves(params)
        )


def half(x: Tensor) -> Tensor:
    """Rounded to float16, in float32."""
    return x.half().float()


def _halves(params: Any) -> list[tuple[str, Tensor]]:
    """The parameters that are stored in float16."""
    fields = [field.name for field in dataclasses.fields(params)]
    return [(name, getattr(params, name)) for name in fields if name in ("d", "dmin", "m")]


def divisor(step: Tensor) -> Tensor:
    """step, or infinity for 0: every code has the same value there, that of level 0 is as good as any."""
    return torch.where(step == 0, torch.inf, step)
