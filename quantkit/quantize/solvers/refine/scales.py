"""The values of a group, and the best common factor of them."""

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny


def values_of(levels: Tensor, step: Tensor, low: Tensor) -> Tensor:
    """Return `step * level - low`, `[..., group_size, out]`; step, low: `[..., sub-blocks, out]`."""
    values = levels.unflatten(-2, (step.shape[-2], -1)) * step.unsqueeze(-2)
    return values.sub_(low.unsqueeze(-2)).flatten(-3, -2)


def best_factor(along: Tensor, power: Tensor) -> Tensor:
    """Return the best factor of values V, from `<R, V>` and `<V, H V>`; 1 if it is not above 0."""
    factor = 1 + along / power.clamp(min=TINY)
    return torch.where((power > 0) & (factor > 0), factor, 1.0)
