"""ggml blocks as they lie in a GGUF file: rows of blocks, little-endian, made of the parts in `parts.py`."""

from functools import cache
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError, require
from quantkit.grids.ggml import TYPES, iquants, named
from quantkit.grids.ggml.block import BlockGrid, BlockParams
from quantkit.grids.ggml.fp4 import E4m3Scales, Nvfp4Blocks
from quantkit.grids.ggml.iquants import CodeBookGrid
from quantkit.grids.ggml.nearest import SIGNS
from quantkit.grids.grid import flat, is_finite, matrix
from quantkit.grids.levels import HALF_MAX
from quantkit.grids.parallel import by_chunks
from quantkit.layouts.ggml.parts import BLOCKS

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

SMALL, SMALL_SHARE = 2.0**-12, 2.0**-16  # larger weights, and larger shares of the largest, never vanish
# Added to signed scales, and to those of i-quants.
SCALE_BIAS = {"Q3_K": 32, "Q6_K": 128, "IQ4_XS": 32} | dict.fromkeys(iquants.GRIDS, -0.5)


def row_bytes(type_name: str, in_features: int) -> int:
    """Return the bytes of one row of `in_features` weights of a ggml type. Raises QuantkitError if the row is
    not whole ggml blocks."""
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    what = f"rows of {in_features} weights do not divide into {type_name} blocks of {block}"
    require(in_features % block == 0, what, "choose a type with smaller blocks")
    return in_features // block * size


def encode_rows(type_name: str, weight: Tensor, importance: Tensor | None = None) -> Tensor:
    """Return `weight [rows, in]` encoded as ggml's own encoder does, uint8 `[rows, row_bytes]`. importance:
    `[in]` or `[rows, in]`; see grids.ggml."""
    count, width = weight.shape
    encoded = torch.empty(count, row_bytes(type_name, width), dtype=torch.uint8, device=weight.device)
    if importance is not None:
        importance = importance.expand_as(weight)

    def plain(rows: slice) -> None:
        if type_name in PLAIN:
            encoded[rows] = weight[rows].to(PLAIN[type_name]).contiguous().view(torch.uint8)
        else:  # for weights that were trained as -1, 0 and 1
            values = weight[rows].float().cpu().numpy()
            encoded[rows] = torch.from_numpy(gguf.quants.quantize(values, GGMLQuantizationType[type_name]))

    def blocks(rows: slice) -> None:
        weights = None if importance is None else importance[rows].float()
        encoded[rows] = pack(grid, *grid.quantize(weight[rows].float(), weights))

    grid = named(type_name).together([weight]) if type_name in TYPES else None
    by_chunks(blocks if grid else plain, weight)
    return encoded


def separate_scale(type_name: str, weight: Tensor) -> float | None:
    """Return the NVFP4 scale by which a decoder multiplies all of `encode_rows`; None for other types."""
    grid = named(type_name).together([weight]) if type_name in TYPES else None
    return 1 / grid.divisor if isinstance(grid, Nvfp4Blocks) else None


def vanished(type_name: str, weight: Tensor, encoded: Tensor) -> int:
    """Return how many weights `[rows, in]` became 0 because the type's range does not reach down to them: of
    float types single weights, of others those of whole ggml blocks.

    Raises QuantkitError if weights are too large for the type.
    """
    size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][0]
    if size > 1:  # few matrices have such weights, and only their rows are decoded
        low, high = weight.unflatten(1, (-1, size)).aminmax(dim=2)
        largest = torch.maximum(-low, high).float()
        small = (largest > 0) & (largest < max(SMALL, SMALL_SHARE * float(largest.max())))
        rows = (small | (largest >= HALF_MAX)).any(1).nonzero()[:, 0]
        if not len(rows):
            return 0
        weight, encoded = weight[rows], encoded[rows]
    plain = PLAIN.get(type_name)
    values = encoded.view(plain) if plain else decode_rows(type_name, encoded, weight.shape[1])
    what = f"weights up to {weight.abs().max():.3g} are too large for {type_name}"
    require(is_finite(values), what, "choose a type with more range, such as BF16", UNSUPPORTED)
    kept, present = (matrix.unflatten(1, (-1, size)).any(2) for matrix in (values, weight))
    return size * int((~kept & present).sum())


def decode_rows(type_name: str, encoded: Tensor, in_features: int) -> Tensor:
    """Return values, float32 `[rows, in]`, of bytes `[rows, row_bytes]` of any type that gguf can decode.

    Raises QuantkitError for other types.
    """
    values = torch.empty(len(encoded), in_features)

    def decode(rows: slice) -> None:
        blocks = encoded[rows].contiguous().cpu().numpy()
        with np.errstate(invalid="ignore"):  # infinite scales: callers look for values that are not finite
            values[rows] = torch.from_numpy(gguf.quants.dequantize(blocks, GGMLQuantizationType[type_name]))

    try:
        by_chunks(decode, values)
    except NotImplementedError as error:
        hint = f"quantkit reads what gguf decodes: {', '.join((*PLAIN, *TYPES))} and others"
        raise QuantkitError(f"tensors of type {type_name} are not supported", hint, UNSUPPORTED) from error
    return values.to(encoded.device)


def pack(grid: BlockGrid, codes: Tensor, params: Any) -> Tensor:
    """Return bytes `[out, row_bytes]` of codes uint8 `[out, in]` and parameters `[out, groups, ...]`."""
    params = flat(params)
    grouped = codes.reshape(-1, grid.group_size)
    values = {name: part for name, part in vars(params).items() if part is not None}
    if "mins" in values:
        values["scales_and_mins"] = torch.cat([params.scales, params.mins], 1).to(torch.uint8)
    elif "scales" in values and not isinstance(params, E4m3Scales):
        values["scales"] = (params.scales + SCALE_BIAS.get(grid.name, 0)).to(torch.uint8)
    values |= _vectors(grid, grouped) if isinstance(grid, CodeBookGrid) else {"codes": grouped}
    return torch.cat([part.pack(values) for part in BLOCKS[grid.name]], 1).view(len(codes), -1)


def unpack(grid: BlockGrid, encoded: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Any]:
    """Invert `pack`. scale: `[1]`, by which all values are multiplied; None for 1."""
    blocks = encoded.reshape(-1, row_bytes(grid.name, grid.group_size))
    stored: dict[str, Tensor] = {}
    for part, piece in zip(BLOCKS[grid.name], blocks.split(_widths(grid.name), 1), strict=True):
        for source, value in part.unpack(piece.contiguous()).items():
            stored[source] = value | stored[source] if source in stored else value
    if isinstance(grid, CodeBookGrid):
        stored["codes"] = _codes(grid, stored.pop("places").long(), stored.pop("signs").long())
    codes = stored.pop("codes").view(len(encoded), -1)
    if isinstance(grid, Nvfp4Blocks):
        divisor = torch.ones_like(stored["scales"][:, 0])
        divisor = divisor if scale is None else divisor / scale
        return codes, matrix(E4m3Scales(stored["scales"], divisor), len(encoded))
    if "scales" in stored:
        stored["scales"] = stored["scales"].float() - SCALE_BIAS.get(grid.name, 0)
    if "scales_and_mins" in stored:
        stored["scales"], stored["mins"] = stored.pop("scales_and_mins").float().chunk(2, 1)
    return codes, matrix(BlockParams(**stored), len(encoded))


@cache
def _widths(type_name: str) -> list[int]:
    """Return the bytes that each part of a ggml block takes, found by packing zeros."""
    grid = named(type_name)
    sub_blocks = grid.group_size // grid.sub_size
    counts = {"codes": grid.group_size, "scales": sub_blocks, "scales_and_mins": 2 * sub_blocks}
    if isinstance(grid, CodeBookGrid):
        counts |= {"places": grid.group_size // grid.book().size, "signs": grid.group_size // SIGNS}
    zeros = {name: torch.zeros(1, count, dtype=torch.int64) for name, count in counts.items()}
    zeros |= dict.fromkeys(("d", "dmin", "m"), torch.zeros(1))
    return [part.pack(zeros).shape[1] for part in BLOCKS[type_name]]


def _vectors(grid: CodeBookGrid, codes: Tensor) -> dict[str, Tensor]:
    """Return code-book indices and signs (eight in a number), int64 `[blocks, n]` each, of codes uint8
    `[blocks, group_size]`. Types that store only seven of eight signs have an even number of minus signs."""
    book = grid.book(codes.device)
    digits = (codes >> 1).long().unflatten(1, (-1, book.size)).permute(2, 0, 1)
    signs = (codes & 1).long().unflatten(1, (-1, SIGNS)) << torch.arange(SIGNS, device=codes.device)
    return {"places": book.found[book.number(digits)], "signs": signs.sum(2)}


def _codes(grid: CodeBookGrid, places: Tensor, signs: Tensor) -> Tensor:
    """Invert `_vectors`."""
    bits = signs[..., None] >> torch.arange(SIGNS, device=places.device) & 1
    if grid.even:
        bits[..., -1] = bits[..., :-1].sum(-1) & 1
    digits = grid.book(places.device).digits[:, places].permute(1, 2, 0).flatten(1)
    return (2 * digits + bits.flatten(1)).to(torch.uint8)
