"""The base class of grids, and operations on parameters of many groups: join, slice, select."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.parallel import for_each, rows_per_piece

# Each grid's own frozen dataclass of tensors: exactly the values that will be stored. Dimension 0 counts
# rows, `[rows, ...]` for one group of columns; a matrix has its groups in dimension 1, `[out, groups, ...]`.
Params = TypeVar("Params", bound=Any)


class Grid:
    """The quantization of groups of `group_size` neighbouring columns of `W [out, in]`, for solvers and
    transforms. A subclass overrides the methods that raise here.

    Error feedback rounds single columns: in every grid `value = step * level - low`, with one step and low
    for `sub_size` columns of a row, and the same levels for all rows. In units of steps, rounding a column
    needs no parameters and no extra pass.
    bits: of a code. spans_matrix: parameters depend on all groups of a matrix (double quantization) and are
    fitted before any column is chosen. vector_size: columns chosen together from a code book
    (`ggml.iquants.CodeBookGrid`). weighted: round to nearest uses the importance of input columns, like
    llama.cpp's encoders. joint: linears that engines fuse share parameters (`together`). clip: with second
    moments, round to nearest clips each group's range by AWQ's search. many: `fit` takes groups of several
    matrices, with an importance for each, `[matrices, group_size]`. Only with spans_matrix or
    vector_size > 1 may `fit` and `refit` wait for the device. has_min: every sub-block has a min. limits: of
    the levels; None if `snap` does more than round or look up. floating: names of the parameters that are
    floating point. untrained: without such names, why distillation cannot train the parameters, and a hint.
    """

    group_size: int
    bits: int
    vector_size = 1
    spans_matrix = False
    weighted = False
    joint = False
    has_min = False
    clip = False
    many = False
    limits: tuple[int, int] | None = None
    floating: tuple[str, ...] = ()
    untrained = (
        "which of its values are floating point is unknown",
        "compress the teacher with a method of quantkit's own",
    )
    label: str

    @property
    def sub_size(self) -> int:
        """Number of columns in a group that share one step; group_size if the group has one step."""
        return self.group_size

    def describe(self) -> str:
        """Return the grid's name in plans, such as `4 bit, groups of 128`."""
        return self.label

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Params:
        """Return parameters for groups `weight [rows, group_size]` (float32). importance: `[group_size]`,
        cost of a squared error in each column. Searches work on columns, so a transposed view is free.

        Raises QuantkitError if the grid can only be decoded.
        """
        raise QuantkitError(
            f"{self.describe()}: quantkit only reads such weights", "choose another grid", UNSUPPORTED
        )

    def fit_matrix(self, weight: Tensor, importance: Tensor | None = None) -> Params:
        """Return parameters `[out, groups]` for `weight [out, in]`; every group is fitted alone. importance:
        `[in]`, for grids that are weighted."""
        return matrix(self.fit(weight.reshape(-1, self.group_size)), len(weight))

    def together(self, weights: Sequence[Tensor]) -> Self:
        """Return the grid for linears `weights [out_k, in]` with the same input, which engines may fuse:
        parameters of the whole matrix suit all of them."""
        return self

    def plain(self) -> Self:
        """Return a grid with the same values but without a search of the range."""
        searched = {name: False for name in ("search", "clip") if getattr(self, name, None) is True}
        return dataclasses.replace(self, **searched) if searched else self

    def round(self, weight: Tensor, params: Params) -> Tensor:
        """Return the nearest codes, uint8 `[rows, group_size]`. This one is for grids without a low."""

        def work(rows: Tensor, step: Tensor) -> Tensor:
            codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
            self.codes(rows / step[:, None], codes)
            return codes

        return map_rows(work, torch.uint8, weight, self.steps(params)[0][0])

    def decode(self, codes: Tensor, params: Params) -> Tensor:
        """Return values, float32 `[rows, group_size]`, as `round`; autograd tracks the parameters."""

        def work(rows: Tensor, step: Tensor) -> Tensor:
            return self.levels(rows).mul_(step[:, None])

        return map_rows(work, torch.float32, codes, self.steps(params)[0][0])

    def nearest(self, weight: Tensor, params: Params) -> Tensor:
        """Return `decode(round(weight, params), params)`; may change `weight` in place."""
        return self.decode(self.round(weight, params), params)

    def steps(self, params: Params) -> tuple[Tensor, Tensor]:
        """Return step and low of every sub-block of a group, `[sub-blocks, rows]`. If all codes have the same
        value, the step is NO_STEP, so large that every weight is nearest to level 0."""
        raise NotImplementedError

    def snap(self, target: Tensor, out: Tensor) -> None:
        """Write the level nearest to each `target` into `out`; does not wait for the device."""
        raise NotImplementedError

    def level_places(self, device: torch.device) -> Tensor | None:
        """Return the table in which `snap` looks targets up, rounded towards zero; None if it only rounds."""
        return None

    def levels(self, codes: Tensor) -> Tensor:
        """Return the levels of codes of any shape, float32."""
        raise NotImplementedError

    def codes(self, levels: Tensor, out: Tensor) -> None:
        """Write the codes of levels into `out` (uint8): the inverse of `levels`."""
        raise NotImplementedError

    def refit(self, weight: Tensor, params: Params, k: int, importance: Tensor) -> Params:
        """Return parameters with sub-block k fitted again to `weight [sub_size, rows]`; all others stay.
        importance: `[sub_size]`. This and the next two methods are only for sub_size < group_size."""
        raise NotImplementedError

    def rescaled(self, params: Params, k: int, factor: Tensor) -> Params:
        """Return parameters whose scale of sub-block k is `factor [rows]` times as large, rounded to a
        storable one other than 0."""
        raise NotImplementedError

    def shifted(self, params: Params, k: int, shift: Tensor) -> Params:
        """Return parameters whose values in sub-block k grow by `shift [rows]`, with the nearest storable
        min. Only with has_min."""
        raise NotImplementedError

    def scaled(self, params: Params, factor: Tensor) -> Params:
        """Return parameters whose values are `factor [rows]` times as large, rounded to storable ones."""
        raise NotImplementedError

    def clipped(self, params: Params) -> int:
        """Return how many parameters are at the limits of their stored dtype, where weights may be lost."""
        return 0

    def floats(self, params: Params) -> dict[str, Tensor]:
        """Return the floating-point parameters of a matrix, float32 by name, every stored number once.
        Distillation trains these; codes stay the same.

        Raises QuantkitError if the grid does not define them.
        """
        if not self.floating:
            why, hint = self.untrained
            raise QuantkitError(f"{self.describe()}: {why}", hint, UNSUPPORTED)
        return {name: getattr(params, name).float() for name in self.floating}

    def with_floats(self, params: Params, floats: Mapping[str, Tensor]) -> Params:
        """Return parameters with these floats instead; autograd tracks them."""
        return dataclasses.replace(params, **floats)

    def storable(self, floats: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the floats rounded to the nearest values that can be stored."""
        return {name: self._storable(value) for name, value in floats.items()}

    def _storable(self, value: Tensor) -> Tensor:
        """Return `value` rounded to the nearest values that can be stored."""
        return value


def each_of(change: Callable[..., Tensor], first: Params, *others: Params) -> Params:
    """Return parameters in which `change` was applied to the corresponding tensors of all arguments."""
    names = [name for name, part in vars(first).items() if part is not None]
    return dataclasses.replace(
        first, **{name: change(*(getattr(part, name) for part in (first, *others))) for name in names}
    )


def join(groups: Sequence[Params]) -> Params:
    """Return the parameters of a matrix, from those of its groups in order."""
    return each_of(lambda *parts: torch.stack(parts, 1), *groups)


def stack(matrices: Sequence[Params]) -> Params:
    """Return the parameters of matrices that are concatenated along rows."""
    return each_of(lambda *parts: torch.cat(parts), *matrices)


def group(params: Params, index: int) -> Params:
    """Return the parameters of one group of a matrix."""
    return each_of(lambda part: part[:, index], params)


def rows(params: Params, rows: slice | int) -> Params:
    """Return the parameters of some rows, for a group or a matrix; of one of several matrices."""
    return each_of(lambda part: part[rows], params)


def regrouped(params: Params, order: Tensor) -> Params:
    """Return parameters `[matrices * out, groups, ...]` as `[matrices, out, groups, ...]`, with the groups in
    each matrix's `order [matrices, groups]`."""

    def moved(part: Tensor) -> Tensor:
        index = order.view(len(order), 1, -1, *[1] * (part.ndim - 2))
        return part.unflatten(0, (len(order), -1)).take_along_dim(index, 2)

    return each_of(moved, params)


def select(choice: Tensor, yes: Params, no: Params) -> Params:
    """Return, row by row, the parameters of `yes` if `choice [rows]` is True, else those of `no`."""
    return each_of(lambda a, b: torch.where(choice.view(-1, *[1] * (a.ndim - 1)), a, b), yes, no)


def each_row(importance: Tensor, rows: int) -> Tensor:
    """Return importance `[group_size]` or `[matrices, group_size]` as `[rows, group_size]`, the rows of one
    matrix after those of another."""
    parts = importance.view(-1, 1, importance.shape[-1])
    return parts.expand(-1, rows // len(parts), -1).flatten(0, 1)


def flat(params: Params) -> Params:
    """Return parameters `[out, groups, ...]` as `[out * groups, ...]`: every group becomes a row."""
    return each_of(lambda part: part.flatten(0, 1), params)


def matrix(params: Params, out_features: int) -> Params:
    """Invert `flat`."""
    return each_of(lambda part: part.unflatten(0, (out_features, -1)), params)


def by_rows(work: Callable[..., Tensor], out: Tensor, *parts: Tensor) -> Tensor:
    """Set `out[rows] = work(*(part[rows] for part in parts))`, on all threads, as many rows at a time as fit
    the cache. Returns `out`.

    Temporaries as large as a weight would cost more in page faults than the work itself.
    """
    widest = max(part[:1].numel() for part in (out, *parts))
    rows = rows_per_piece(out.device, widest)
    pieces = list(zip(out.split(rows), *(part.split(rows) for part in parts), strict=True))
    for_each(lambda target, *arguments: target.copy_(work(*arguments)), pieces)
    return out


def map_rows(work: Callable[..., Tensor], dtype: torch.dtype, first: Tensor, *parts: Tensor) -> Tensor:
    """Return the result of `by_rows` in a new tensor with the shape of `first`; all rows at once where
    autograd follows."""
    if any(part.requires_grad for part in parts):
        return work(first, *parts)
    return by_rows(work, torch.empty(first.shape, dtype=dtype, device=first.device), first, *parts)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite. (With a NaN among the values, torch's minimum is NaN.)"""
    return not tensor.numel() or all(map(math.isfinite, torch.stack(tensor.aminmax()).tolist()))


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight: a solver returns it and a layout encodes it.

    codes: uint8 `[out, in]`, columns in the order of the original weight.
    params: the grid's own, for `[out, groups]`.
    column_group: int64 `[in]`, the group of each column, if columns were reordered across groups (desc_act);
    None means `arange(in) // group_size`.
    input_peak: the linear's largest |input| in calibration text, a float32 scalar, if the layout stores a
    scale of activations; else None.
    """

    grid: Grid
    codes: Tensor
    params: Any
    column_group: Tensor | None = None
    input_peak: Tensor | None = None

    def group_of_columns(self) -> Tensor:
        """Return the group of each column, int64 `[in]`, even if `column_group` is None."""
        if self.column_group is not None:
            return self.column_group
        return torch.arange(self.codes.shape[1], device=self.codes.device) // self.grid.group_size

    def values(self) -> Tensor:
        """Return the dequantized weight, float32 `[out, in]`; autograd tracks its floats."""
        if self.column_group is None:
            grouped = self.codes.reshape(-1, self.grid.group_size)
            return self.grid.decode(grouped, flat(self.params)).view(self.codes.shape)
        values = torch.empty(self.codes.shape, dtype=torch.float32, device=self.codes.device)
        for index in range(int(self.column_group.max()) + 1):
            columns = (self.column_group == index).nonzero()[:, 0]
            values[:, columns] = self.grid.decode(self.codes[:, columns], group(self.params, index))
        return values

    def floats(self) -> dict[str, Tensor]:
        """See `Grid.floats`."""
        return self.grid.floats(self.params)

    def with_floats(self, floats: Mapping[str, Tensor]) -> Self:
        """Return the weight with the same codes and other floating-point parameters."""
        return dataclasses.replace(self, params=self.grid.with_floats(self.params, floats))
