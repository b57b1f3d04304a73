"""Parameters of ggml's types as they are stored; they define step and low in `value = step * level - low`.

d, dmin, m: float16 values in float32, `[rows]` for one ggml block or `[out, blocks]` for a matrix. scales,
mins: integers in float32, `[..., sub-blocks]`. Method `steps`: step and low of every sub-block.
"""

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
    """The step is d times a scale: signed, or in i-quants an unsigned integer plus 1/2."""

    d: Tensor
    scales: Tensor

    def steps(self) -> tuple[Tensor, Tensor]:
        return self.scales * self.d[..., None], torch.zeros_like(self.scales)


@dataclass(frozen=True)
class SubScalesAndMins:
    """Scales and minimums of sub-blocks, unsigned: a value is d · scale · code - dmin · min."""

    d: Tensor
    dmin: Tensor
    scales: Tensor
    mins: Tensor

    def steps(self) -> tuple[Tensor, Tensor]:
        return self.scales * self.d[..., None], self.mins * self.dmin[..., None]


def half(x: Tensor) -> Tensor:
    """Return x rounded to float16, as float32."""
    return x.half().float()


def halves(params: Any) -> dict[str, Tensor]:
    """Return the parameters among d, dmin and m that exist, by name."""
    return {name: getattr(params, name) for name in ("d", "dmin", "m") if hasattr(params, name)}
