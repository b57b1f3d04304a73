"""What a block of an i-quant stores instead of codes: places of vectors in the code book, and signs; of one
bit, which way they are moved.

Of eight signs some types store seven: the eighth follows, since an even number of weights is negative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.grids.ggml.block import BlockGrid
from quantkit.grids.ggml.iq1 import OneBitGrid
from quantkit.grids.ggml.iquants import CodeBookGrid
from quantkit.grids.ggml.nearest import SIGNS

NIBBLES = 4  # of a float16 that is stored in parts


def counts(grid: BlockGrid) -> dict[str, int]:
    """How many integers of each kind a block has, besides its scales; none for a grid without a code book."""
    if isinstance(grid, CodeBookGrid | OneBitGrid):
        return {
            "places": grid.group_size // grid.book.size,
            "signs": grid.group_size // SIGNS,
            "moves": grid.group_size // grid.sub_size,
            "moved_places": grid.group_size // SIGNS,
            "d_nibbles": NIBBLES,
        }
    return {}


def integers(grid: BlockGrid, codes: Tensor, params: Any) -> dict[str, Tensor]:
    """int64 `[blocks, n]` of each kind for codes uint8 `[blocks, group_size]`."""
    if isinstance(grid, CodeBookGrid):
        return {"places": _places(grid, codes >> 1), "signs": _bits(codes & 1)}
    places, down = _places(grid, codes % 3), (codes >= 3).long()
    shifts = 4 * torch.arange(NIBBLES, device=codes.device)
    nibbles = params.d.half()[:, None].view(torch.int16).long() >> shifts
    return {
        "places": places,
        "moves": down[:, :: grid.sub_size],
        "moved_places": places >> 8 | down[:, ::SIGNS] << 3,
        "d_nibbles": nibbles & 15,
    }


def codes(grid: BlockGrid, found: dict[str, Tensor]) -> Tensor:
    """Codes uint8 `[blocks, group_size]` of the integers, which are taken out of `found`."""
    places = found.pop("places").long()
    if isinstance(grid, CodeBookGrid):
        bits = found.pop("signs").long()[..., None] >> torch.arange(SIGNS, device=places.device) & 1
        if grid.even:
            bits[..., -1] = bits[..., :-1].sum(-1) & 1
        return (2 * _digits(grid, places) + bits.flatten(1)).to(torch.uint8)
    if "moves" in found:
        down = found.pop("moves").long().repeat_interleave(grid.sub_size, 1)
    else:
        moved = found.pop("moved_places").long()
        places, down = places | (moved & 7) << 8, (moved >> 3).repeat_interleave(SIGNS, 1)
        bits = found.pop("d_nibbles").long() << 4 * torch.arange(NIBBLES, device=places.device)
        found["d"] = bits.sum(1).to(torch.int16).view(torch.float16).float()
    return (_digits(grid, places) + 3 * down).to(torch.uint8)


def _places(grid: Any, digits: Tensor) -> Tensor:
    book = grid.book.to(digits.device)
    return book.found[book.number(digits.long().unflatten(1, (-1, book.size)).permute(2, 0, 1))]


def _digits(grid: Any, places: Tensor) -> Tensor:
    return grid.book.to(places.device).digits[:, places].permute(1, 2, 0).flatten(1)


def _bits(negative: Tensor) -> Tensor:
    shifts = torch.arange(SIGNS, device=negative.device)
    return (negative.long().unflatten(1, (-1, SIGNS)) << shifts).sum(2)
