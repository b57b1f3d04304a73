"""Rounding in units of a group's step: the levels of a grid are the same numbers for every row and group."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from quantkit.grids.grid import Grid

NO_STEP = 1e30  # stands for a step of 0: any weight is nearest to level 0


def usable(step: Tensor) -> Tensor:
    """Return `step` to divide by and to multiply with: NO_STEP for 0."""
    return torch.where(step == 0, NO_STEP, step)


class WholeLevels(Grid):
    """Levels are the codes, `first_code` to `2^bits - 1`."""

    first_code = 0

    def snap(self, target: Tensor, out: Tensor) -> None:
        """Write the nearest levels (half to even), into `out`."""
        torch.round(target, out=out).clamp_(self.first_code, 2**self.bits - 1)

    def levels(self, codes: Tensor) -> Tensor:
        """Return levels of codes."""
        return codes.float()

    def codes(self, levels: Tensor, out: Tensor) -> None:
        """Write codes of levels, into `out`."""
        out.copy_(levels)


class TableLevels(Grid):
    """Levels are numbers from a table, ascending, 0 among them; the distance of neighbours is several units.

    Rounded by look-up, without a search: a table tells the nearest level for each interval between two whole
    numbers. One with a midpoint inside leaves what lies about it to either side.
    """

    level_table: tuple[float, ...]

    def snap(self, target: Tensor, out: Tensor) -> None:
        """Write the nearest levels, into `out`."""
        torch.take(_nearest_levels(self.level_table, target.device), self._places(target), out=out)

    def levels(self, codes: Tensor) -> Tensor:
        """Return levels of codes."""
        return torch.take(_ascending(self.level_table, codes.device), codes.long())

    def codes(self, levels: Tensor, out: Tensor) -> None:
        """Write codes of levels, into `out`."""
        torch.take(_nearest_codes(self.level_table, levels.device), self._places(levels), out=out)

    def _places(self, target: Tensor) -> Tensor:
        """Return places in the table, rounded towards zero; negative places count from its end."""
        return target.long().clamp_(int(self.level_table[0]), int(self.level_table[-1]))


@cache
def _ascending(table: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(table).to(device)


@cache
def _nearest_codes(table: tuple[float, ...], device: torch.device) -> Tensor:
    """Return codes, uint8, of what lies between a whole number and the next one away from zero."""
    levels = torch.tensor(table)
    places = torch.cat([torch.arange(int(table[-1]) + 1.0) + 0.5, torch.arange(int(table[0]), 0.0) - 0.5])
    return torch.bucketize(places, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).to(device)


@cache
def _nearest_levels(table: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.take(_ascending(table, device), _nearest_codes(table, device).long())
