"""A grid of three values: `w = scale * {-1, 0, 1}`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.grids.grid import matrix
from quantkit.grids.levels import WholeLevels, usable


@dataclass(frozen=True)
class TernaryParams:
    """scale: `[rows]`, or `[out, groups]` for a matrix."""

    scale: Tensor


@dataclass(frozen=True)
class TernaryGrid(WholeLevels):
    """Codes are 0, 1 and 2; the scale is 4/3 of the mean of |w|."""

    group_size: int = 32
    bits = 2
    spans_matrix = weighted = clip = False

    @property
    def sub_size(self) -> int:
        return self.group_size

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> TernaryParams:
        return TernaryParams((weight.abs().mean(1) * 4 / 3).half().float())

    def fit_matrix(self, weight: Tensor, importance: Tensor | None = None) -> TernaryParams:
        return matrix(self.fit(weight.reshape(-1, self.group_size)), len(weight))

    def plain(self) -> TernaryGrid:
        return self

    def snap(self, target: Tensor, out: Tensor) -> None:
        torch.round(target, out=out).clamp_(0, 2)

    def steps(self, params: TernaryParams) -> tuple[Tensor, Tensor]:
        step = usable(params.scale)[None]
        return step, step

    def round(self, weight: Tensor, params: TernaryParams) -> Tensor:
        return ((weight / usable(params.scale)[:, None]).round().clamp(-1, 1) + 1).to(torch.uint8)

    def decode(self, codes: Tensor, params: TernaryParams) -> Tensor:
        return (codes.float() - 1) * params.scale[:, None]

    def nearest(self, weight: Tensor, params: TernaryParams) -> Tensor:
        return self.decode(self.round(weight, params), params)

    def scaled(self, params: TernaryParams, factor: Tensor) -> TernaryParams:
        return TernaryParams((params.scale * factor).half().float())

    def clipped(self, params: TernaryParams) -> int:
        return 0

    def describe(self) -> str:
        return f"ternary, groups of {self.group_size}"
