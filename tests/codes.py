"""Weights that hold every code, and codes as words: one big integer, cut up."""

import torch

from quantkit.grids.affine import AffineGrid, AffineParams
from quantkit.grids.grid import QuantizedWeight


def random_weight(
    grid: AffineGrid, out_features: int, in_features: int, shuffled: bool = False
) -> QuantizedWeight:
    """Every code, and every zero point that the grid has, appears somewhere; scales are not alike."""
    generator, top = torch.Generator().manual_seed(grid.bits), 2**grid.bits
    shape = out_features, in_features // grid.group_size
    codes = torch.randint(top, (out_features, in_features), generator=generator, dtype=torch.uint8)
    codes.view(-1)[:top] = torch.arange(top, dtype=torch.uint8)
    scale = torch.exp(torch.randn(shape, generator=generator)).half().float()
    zero = torch.full(shape, top / 2)
    if not grid.symmetric:
        zero = torch.randint(grid.zero_min, top, shape, generator=generator).float()
        every = torch.arange(top - 1.0, grid.zero_min - 1, -1)[: zero.numel()]
        zero.view(-1)[: len(every)], zero[-1, -1] = every, grid.zero_min
    order = torch.randperm(in_features, generator=generator)
    return QuantizedWeight(
        grid, codes, AffineParams(scale, zero), order // grid.group_size if shuffled else None
    )


def bit_stream(rows: list[list[int]], bits: int) -> torch.Tensor:
    """Each row as one little-endian bit stream in a row of int32 words."""
    words = []
    for values in rows:
        stream = sum(int(value) << (bits * place) for place, value in enumerate(values))
        words.append([stream >> (32 * k) & 0xFFFFFFFF for k in range(-(-len(values) * bits // 32))])
    return signed(words)


def signed(words: list[list[int]]) -> torch.Tensor:
    """Words of 32 bits as int32."""
    return torch.tensor([[w - (1 << 32) if w >> 31 else w for w in row] for row in words], dtype=torch.int32)
