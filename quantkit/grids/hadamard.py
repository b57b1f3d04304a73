"""Hadamard matrices: what spreads a value evenly over many, before it is rounded."""

from __future__ import annotations

import torch
from torch import Tensor


def sylvester(size: int, device: torch.device | None = None) -> Tensor:
    """Sylvester's orthonormal matrix `[size, size]` of a power of 2, float32: symmetric, its own inverse."""
    found = torch.ones(1, 1, device=device)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found / size**0.5
