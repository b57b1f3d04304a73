"""The base class of ggml's types: stored parameters, rounding with them, the walk over a matrix."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, each_row, group, map_rows, matrix, stack
from quantkit.grids.levels import HALF_MAX, HALF_MIN, WholeLevels, usable
from quantkit.grids.parallel import by_chunks

CHANGES = (-8, -4, -2, -1, 0, 1, 2, 4, 8)  # of a scale that `refit` tries
Encoded = Iterator[Any]  # parameters of each ggml block, then codes `[group_size, blocks]`


@dataclass(frozen=True)
class BlockParams:
    """The parameters that a type has; the others are None. They define `value = step * level - low`.

    d, dmin, m: float16 values in float32, `[rows]` for one ggml block or `[out, blocks]` for a matrix.
    scales, mins: integers in float32, `[..., sub-blocks]`; scales of i-quants are integers plus 1/2. The step
    is d, or d times a scale. m is added to every value; dmin times a min is subtracted.
    """

    d: Tensor
    scales: Tensor | None = None
    dmin: Tensor | None = None
    mins: Tensor | None = None
    m: Tensor | None = None

    def steps(self) -> tuple[Tensor, Tensor]:
        """Return step and low of every sub-block, `[..., sub-blocks]`."""
        step = self.d[..., None] if self.scales is None else self.scales * self.d[..., None]
        if self.m is not None:
            return step, -self.m[..., None]
        return step, torch.zeros_like(step) if self.mins is None else self.mins * self.dmin[..., None]

    def halves(self) -> dict[str, Tensor]:
        """Return d, dmin and m by name, if the type has them."""
        parts = {"d": self.d, "dmin": self.dmin, "m": self.m}
        return {name: part for name, part in parts.items() if part is not None}


def half(x: Tensor) -> Tensor:
    """Return x rounded to float16, as float32."""
    return x.half().float()


@dataclass(frozen=True)
class Blocks:
    """ggml blocks in an encoder. Each block is a column, so that one pass over memory handles all of them.

    x: float32 `[group_size, blocks]`, row by row of the matrix. importance: the same shape, or None. per_row:
    number of ggml blocks in a row of the matrix. quick: fewer scales may be tried than in ggml, and errors
    may be weighed by importance alone.
    """

    x: Tensor
    importance: Tensor | None
    per_row: int
    quick: bool = False


def split(x: Tensor, size: int) -> Tensor:
    """Convert `[group_size, blocks]` to `[size, sub-blocks * blocks]`: a sub-block becomes a column."""
    return x.unflatten(0, (-1, size)).transpose(0, 1).reshape(size, -1)


def join(x: Tensor, blocks: int) -> Tensor:
    """Invert `split`."""
    return x.unflatten(1, (-1, blocks)).transpose(0, 1).reshape(-1, blocks)


@dataclass(frozen=True)
class BlockGrid(WholeLevels):
    """A ggml type: sub-blocks of `sub_size` weights with values `step * (code - offset) - low`. bits: of a
    code. scale_range: smallest and largest scale of a sub-block, for types with such scales. weighted:
    importance changes the result. (All dataclass fields are written into manifests.)"""

    name: str
    bits: int
    group_size: int
    sub_size: int = 32
    offset: int = 0
    weighted = many = True
    scale_range = 0, 0

    def _encode(self, blocks: Blocks) -> Encoded:
        """Yield parameters without waiting for the device; then codes, computed only if asked for."""
        raise NotImplementedError

    def _level(self, codes: Tensor) -> Tensor:
        """Return the levels of codes, float32, with `value = step * level - low`."""
        return codes - self.offset

    def _nearest(self, level: Tensor) -> Tensor:
        """Return the codes (float32) of the nearest levels; changes `level` in place."""
        return level.round_().add_(self.offset).clamp_(0, 2**self.bits - 1)

    def quantize(self, weight: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return codes uint8 `[out, in]` and parameters `[out, in / group_size]` for `weight [out, in]`
        (float32), byte for byte as ggml does (quantize_row_*_ref, and *_impl with importance).

        importance: cost of a squared error in each column, `[in]`, or `[matrices, in]` for as many matrices
        of the same shape; llama.cpp's imatrix.
        """
        codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
        return codes, self._parameters(weight, importance, codes)

    def _parameters(
        self, weight: Tensor, importance: Tensor | None, codes: Tensor | None = None, quick: bool = False
    ) -> Any:
        """Return the parameters of `quantize`; write into `codes` if they are given. quick: see `Blocks`."""
        if importance is not None:
            importance = each_row(importance, len(weight))

        def encode(rows: slice) -> Any:
            blocks = Blocks(
                self._columns(weight[rows]),
                None if importance is None else self._columns(importance[rows]),
                weight.shape[1] // self.group_size,
                quick,
            )
            encoded = self._encode(blocks)
            params = next(encoded)
            if codes is not None:
                codes[rows].view(-1, self.group_size).copy_(next(encoded).to(torch.uint8).t())
            return params

        return matrix(stack(by_chunks(encode, weight)), len(weight))

    def _columns(self, weight: Tensor) -> Tensor:
        return weight.reshape(-1, self.group_size).t().contiguous()

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Any:
        """Return parameters for ggml blocks `weight [rows, group_size]`, found as ggml does, except that
        K-quants with mins try fewer scales, and weigh errors by importance alone. Where ggml uses the mean
        square of a row, each block counts as a row."""
        return group(self._parameters(weight, importance, quick=True), 0)

    def fit_matrix(self, weight: Tensor, importance: Tensor | None = None) -> Any:
        return self._parameters(weight, importance)

    def describe(self) -> str:
        return f"{self.name}, blocks of {self.group_size}"

    def round(self, weight: Tensor, params: Any) -> Tensor:
        def work(rows: Tensor, step: Tensor, low: Tensor) -> Tensor:
            level = (rows.unflatten(1, (-1, self.sub_size)) + low[..., None]) / step[..., None]
            return self._nearest(level).flatten(1)

        step, low = params.steps()
        return map_rows(work, torch.uint8, weight, torch.where(step == 0, torch.inf, step), low)

    def steps(self, params: Any) -> tuple[Tensor, Tensor]:
        return self.in_levels(*(part.t() for part in params.steps()))

    def in_levels(self, step: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        """Return step and low for levels, from those for values `step * (code - offset) - low`."""
        return usable(step), low + step * self.offset

    def refit(self, weight: Tensor, params: Any, k: int, importance: Tensor) -> Any:
        """Return `params` of ggml blocks `[rows]` with the integers of sub-block k chosen again for
        `weight [sub_size, rows]`.

        The present scale and CHANGES of it are tried in one pass, each with the min that suits its codes;
        the one with the least squared error, weighted by importance `[sub_size]`, is used.
        """
        lowest, highest = self.scale_range
        present = params.scales[:, k]
        scales = torch.stack([present + change for change in CHANGES]).clamp_(lowest, highest)
        fitted = {"scales": scales}
        steps = (params.d * scales)[:, None]  # [candidates, 1, rows]
        low = steps.new_zeros(1)
        if params.mins is not None:  # codes for the present min, then their min
            low = params.dmin * params.mins[:, k]
            above = importance @ _errors(self, weight, steps, low) / importance.sum() + low
            unit = torch.where(params.dmin == 0, torch.inf, params.dmin)
            fitted["mins"] = (above / unit).round_().clamp_(0, highest)
            low = (params.dmin * fitted["mins"])[:, None]
        best = (importance @ _errors(self, weight, steps, low).square_()).argmin(0, keepdim=True)
        fields = {}
        for name, integers in fitted.items():
            fields[name] = getattr(params, name).clone()
            fields[name][:, k] = integers.gather(0, best)[0]
        return replace(params, **fields)

    def rescaled(self, params: Any, k: int, factor: Tensor) -> Any:
        scales = params.scales.clone()
        new = self._integers(scales[:, k] * factor)
        scales[:, k] = torch.where(new == 0, scales[:, k], new)
        return replace(params, scales=scales)

    def shifted(self, params: Any, k: int, shift: Tensor) -> Any:
        mins = params.mins.clone()
        change = (shift / torch.where(params.dmin == 0, torch.inf, params.dmin)).round_()
        mins[:, k] = (mins[:, k] - change).clamp_(*self.scale_range)
        return replace(params, mins=mins)

    def _integers(self, scale: Tensor) -> Tensor:
        """Return the nearest stored scales."""
        return scale.round_().clamp_(*self.scale_range)

    def decode(self, codes: Tensor, params: Any) -> Tensor:
        """Return values, float32 `[rows, group_size]`, bit for bit as ggml does (dequantize_row_*)."""
        return map_rows(self._values, torch.float32, codes, *params.steps())

    def scaled(self, params: Any, factor: Tensor) -> Any:
        return replace(params, **{n: half(part * factor) for n, part in params.halves().items()})

    def clipped(self, params: Any) -> int:
        sizes = [part.abs() for part in params.halves().values()]
        return sum(int(((size >= HALF_MAX) | (size == HALF_MIN)).sum()) for size in sizes)

    def floats(self, params: Any) -> dict[str, Tensor]:
        """Return d, dmin and m of every ggml block; scales and mins of sub-blocks are integers."""
        return params.halves()

    def _storable(self, value: Tensor) -> Tensor:
        return half(value.clamp(-HALF_MAX, HALF_MAX))

    def _values(self, codes: Tensor, step: Tensor, low: Tensor) -> Tensor:
        level = self._level(codes.float()).unflatten(1, (-1, self.sub_size))
        return (level * step[..., None] - low[..., None]).flatten(1)


def _errors(grid: Grid, weight: Tensor, step: Tensor, low: Tensor) -> Tensor:
    """Return the nearest values minus `weight`, `[candidates, sub_size, rows]`."""
    unit, bottom = grid.in_levels(step, low)
    level = (weight + bottom).div(unit)
    grid.snap(level, level)
    return level.mul_(unit).sub_(bottom).sub_(weight)
