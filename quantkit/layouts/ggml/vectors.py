"""What a block of an i-quant stores instead of codes: places of vectors in the code book, and signs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.grids.ggml.iquants import SIGNS

STORED_SIGNS = 7  # where the eighth follows from the others


TYPES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


def counts(grid: Any) -> dict[str, int]:
    """How many of each are in a block."""
    return {"places": grid.group_size // grid.book.size, "signs": grid.group_size // SIGNS}


def integers(grid: Any, codes: Tensor) -> dict[str, Tensor]:
    """`places [blocks, vectors]` and `signs [blocks, bytes]`, int64, of codes uint8 `[blocks, group_size]`."""
    book = grid.book.to(codes.device)
    digits = (codes >> 1).long().unflatten(1, (-1, book.size)).permute(2, 0, 1)
    bits = torch.arange(SIGNS, device=codes.device)
    signs = ((codes & 1).long().unflatten(1, (-1, SIGNS)) << bits).sum(2)
    return {"places": book.found[book.number(digits)], "signs": signs}


def codes(grid: Any, found: dict[str, Tensor]) -> Tensor:
    """Inverse of `integers`, which are taken out of `found`."""
    places, signs = found.pop("places").long(), found.pop("signs").long()
    book = grid.book.to(places.device)
    digits = book.digits[:, places].permute(1, 2, 0).flatten(1)
    bits = signs[..., None] >> torch.arange(SIGNS, device=signs.device) & 1
    if grid.even:
        bits[..., -1] = bits[..., :STORED_SIGNS].sum(-1) & 1
    return (2 * digits + bits.flatten(1)).to(torch.uint8)
