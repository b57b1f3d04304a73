"""Rounding in units of a group's step: every row and group has the same levels."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quantkit.grids.grid import Grid

HALF_MIN, HALF_MAX = 2.0**-24, 65504.0  # smallest (subnormal) and largest positive float16
NO_STEP = 1e30  # stands for a step of 0: any weight is nearest to level 0


def usable(step: Tensor) -> Tensor:
    """Return `step` with NO_STEP in place of 0, so that division by it works."""
    return torch.where(step == 0, NO_STEP, step)


@dataclass(frozen=True)
class Absmax:
    """absmax: the largest absolute weight, float32, `[rows]` for a group or `[out, groups]` for a matrix."""

    absmax: Tensor


class WholeLevels(Grid):
    """Grids whose levels are their codes, `first_code` to `2^bits - 1`."""

    first_code = 0

    @property
    def limits(self) -> tuple[int, int]:
        return self.first_code, 2**self.bits - 1

    def snap(self, target: Tensor, out: Tensor) -> None:
        """Write the nearest levels into `out`; ties go to even."""
        torch.round(target, out=out).clamp_(*self.limits)

    def levels(self, codes: Tensor) -> Tensor:
        return codes.float()

    def codes(self, levels: Tensor, out: Tensor) -> None:
        out.copy_(levels)


class TableLevels(Grid):
    """Grids with a table of levels, by code. It contains 0, and neighbours are several units apart.

    Rounding is a look-up, without a search: a second table gives the nearest level for each interval between
    two integers. If a midpoint lies inside an interval, values near it may get either level.
    """

    level_table: tuple[float, ...]

    @property
    def limits(self) -> tuple[int, int]:
        return int(min(self.level_table)), int(max(self.level_table))

    def level_places(self, device: torch.device) -> Tensor:
        return _nearest_levels(self.level_table, device)

    def snap(self, target: Tensor, out: Tensor) -> None:
        torch.take(self.level_places(target.device), self._places(target), out=out)

    def levels(self, codes: Tensor) -> Tensor:
        return torch.take(constant(self.level_table, codes.device), codes.long())

    def codes(self, levels: Tensor, out: Tensor) -> None:
        torch.take(nearest_codes(self.level_table, levels.device), self._places(levels), out=out)

    def _places(self, target: Tensor) -> Tensor:
        """Return indices of the intervals, rounded towards zero; negative ones count from the end."""
        return target.long().clamp_(*self.limits)


@cache
def constant(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers as a tensor, which is copied to a device only once."""
    return torch.tensor(numbers, dtype=dtype).to(device)


@cache
def nearest_codes(table: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the code, uint8, of each interval between an integer and the next one away from zero."""
    ascending = sorted(set(table))
    codes = torch.tensor([table.index(level) for level in ascending], dtype=torch.uint8)
    levels, low, high = torch.tensor(ascending), int(min(table)), int(max(table))
    places = torch.cat([torch.arange(high + 1.0) + 0.5, torch.arange(low, 0.0) - 0.5])
    return codes[torch.bucketize(places, (levels[1:] + levels[:-1]) / 2)].to(device)


@cache
def _nearest_levels(table: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.take(constant(table, device), nearest_codes(table, device).long())
