"""Parameters of ggml's block types, as they are stored: what `value = step * level - low` is made of.

d, dmin, m: float16 values in float32, `[rows]` for one block or `[out, blocks]` for a matrix. scales, mins:
integers in float32, `[..., sub-blocks]`. `steps` of any of them: step and low of every sub-block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HALF_MAX = 65504.0
HALF_MIN = 2.0**-24  # smallest positive float16 (subnormal)


@dataclass(frozen=True)
class Scale:
    """The step is d."""

    d: Tensor

    def steps(self) -> tuple[Tensor, Tensor]:
        return self.d[..., None], torch.zeros_like(self.d)[..., None]


@dataclass(frozen=True)
class ScaleAndMin:
    """The step is d; m is added to every value."""

    d: Tensor
    m: Tensor

    def steps(self) -> tuple[Tensor, Tensor]:
        return self.d[..., None], -self.m[..., None]


@dataclass(frozen=True)
class SubScales:
    """The step is d times a signed scale."""

    d: Tensor
    scales: Tensor

    def steps(self) -> tuple[Tensor, Tensor]:
        return self.scales * self.d[..., None], torch.zeros_like(self.scales)


@dataclass(frozen=True)
class SubHalves:
    """The step is d times an unsigned scale and a half."""

    d: Tensor
    scales: Tensor

    def steps(self) -> tuple[Tensor, Tensor]:
        return (self.scales + 0.5) * self.d[..., None], torch.zeros_like(self.scales)


@dataclass(frozen=True)
class SubScalesAndMins:
    """The step is d times an unsigned scale; dmin times an unsigned min is subtracted from every value."""

    d: Tensor
    dmin: Tensor
    scales: Tensor
    mins: Tensor

    def steps(self) -> tuple[Tensor, Tensor]:
        return self.scales * self.d[..., None], self.mins * self.dmin[..., None]


def half(x: Tensor) -> Tensor:
    """Round to float16, in float32."""
    return x.half().float()


def halves(params: Any) -> dict[str, Tensor]:
    """Return d, dmin and m, those there are."""
    return {name: getattr(params, name) for name in ("d", "dmin", "m") if hasattr(params, name)}
