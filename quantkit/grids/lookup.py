"""Rounding to a table of values, and back, by look-up, which takes a thirtieth of a binary search's time.

`values` are at most 256 float32 numbers, ascending.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

UPPER = 20  # bits of a float32 that nearly always tell its code
DOUBT = 1 << 14


def nearest(scaled: Tensor, values: tuple[float, ...]) -> Tensor:
    """Codes, uint8, of the values nearest to `scaled` of any shape; halfway goes to the lower one.

    Found by the upper bits of each number; by a binary search for the few that this leaves in doubt, looked
    for four at a time.
    """
    known, midpoints = (part.to(scaled.device) for part in _by_upper_bits(values))
    flat = scaled.flatten()
    index = (flat.view(torch.int32) >> (32 - UPPER)).bitwise_and_((1 << UPPER) - 1)
    codes = known.index_select(0, index)
    width, word = (4, torch.int64) if len(codes) % 4 == 0 else (1, torch.int16)
    doubtful = (codes.view(word) & sum(DOUBT << 16 * place for place in range(width))).nonzero()[:, 0]
    if len(doubtful):
        again = torch.bucketize(flat.view(-1, width)[doubtful], midpoints, out_int32=True)
        codes.view(-1, width)[doubtful] = again.to(torch.int16)
    return codes.to(torch.uint8).view(scaled.shape)


@cache
def _by_upper_bits(values: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """By the upper UPPER bits of a float32 the code of all that begin with them, int16 `[2 ** UPPER]`, with
    DOUBT added about every midpoint, where they have more than one; the midpoints.
    """
    ascending = torch.tensor(values)
    midpoints = (ascending[1:] + ascending[:-1]) / 2
    lower = 32 - UPPER
    start = torch.arange(1 << UPPER, dtype=torch.int64) << lower
    ends = torch.stack([start, start + (1 << lower) - 1]).to(torch.uint32).view(torch.float32)
    first, last = torch.bucketize(ends.nan_to_num(0.0), midpoints).to(torch.int16)
    return torch.where(first == last, first, first | DOUBT), midpoints


def both(packed: Tensor, values: tuple[float, ...]) -> Tensor:
    """The values of both codes of every byte, high nibble first, float32 `[2 * bytes]`."""
    found = _by_byte(values).to(packed.device).index_select(0, packed.flatten().int())
    return found.view(torch.float32)


@cache
def _by_byte(values: tuple[float, ...]) -> Tensor:
    """Both values of every byte, two float32 in the bits of one int64, `[256]`."""
    codes = torch.arange(256)
    return torch.tensor(values)[torch.stack([codes >> 4, codes & 15], 1)].view(torch.int64)[:, 0]
