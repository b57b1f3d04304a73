"""Parameters of ggml's types as they are stored."""

from dataclasses import dataclass

import torch
from torch import Tensor

HALF_MAX = 65504.0
HALF_MIN = 2.0**-24  # smallest positive float16 (subnormal)


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
