"""ggml's blocks as they lie in a GGUF file: rows of blocks, little-endian (llama.cpp, ggml-common.h).

BLOCKS has the parts of every type in order. Codes of a few bits share bytes so that neighbours in a byte are
`run` codes apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.ggml import TYPES, named
from quantkit.grids.ggml.block import BlockGrid
from quantkit.grids.ggml.params import Scale, ScaleAndMin, SubHalves, SubScales, SubScalesAndMins
from quantkit.grids.grid import flat, matrix
from quantkit.grids.parallel import by_chunks
from quantkit.layouts.ggml import vectors

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Half:
    """A float16 parameter."""

    name: str


@dataclass(frozen=True)
class Bits:
    """`bits` bits from bit `low` on of every integer of `source` ("codes", "scales", "scales_and_mins").

    A byte holds 8 / bits integers that are `run` apart, the first in its lowest bits. flip: bits of the
    byte that are stored inverted, which makes an unsigned byte a signed one.
    """

    source: str
    low: int
    bits: int
    run: int
    flip: int = 0

    def pack(self, integers: Tensor) -> Tensor:
        """uint8 `[blocks, n]` to bytes `[blocks, n * bits / 8]`."""
        values = (integers >> self.low) & 2**self.bits - 1
        parts = values.view(len(values), -1, 8 // self.bits, self.run).unbind(2)
        packed = parts[0] ^ self.flip
        for k, part in enumerate(parts[1:], 1):
            packed = packed | part << self.bits * k
        return packed.flatten(1).to(torch.uint8)

    def unpack(self, packed: Tensor) -> Tensor:
        """Inverse of `pack`; bits that are stored elsewhere are 0."""
        grouped = (packed ^ self.flip).view(len(packed), -1, self.run)
        grouped = grouped.long() if self.low >= 8 else grouped
        mask = 2**self.bits - 1
        parts = [(grouped >> self.bits * k & mask) << self.low for k in range(8 // self.bits)]
        return torch.stack(parts, 2).flatten(1)


@dataclass(frozen=True)
class Words:
    """Words of so many bytes, each made of several integers, the first in its lowest bits.

    integers: `(source, bit, bits, count)`, from bit `bit` on of `count` of the source's integers in a row.
    """

    nbytes: int
    integers: tuple[tuple[str, int, int, int], ...]

    def pack(self, sources: Mapping[str, Tensor]) -> Tensor:
        """int64 `[blocks, n]` each, to bytes `[blocks, n * nbytes / count]`."""
        word, place = 0, 0
        for source, low, bits, count in self.integers:
            for part in sources[source].unflatten(1, (-1, count)).unbind(2):
                word = word | (part.long() >> low & 2**bits - 1) << place
                place += bits
        return word[..., None].view(torch.uint8)[..., : self.nbytes].flatten(1)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """Inverse of `pack`; bits that are stored elsewhere are 0."""
        parts = packed.long().unflatten(1, (-1, self.nbytes)).unbind(2)
        word, place, found = sum(part << 8 * k for k, part in enumerate(parts)), 0, {}
        for source, low, bits, count in self.integers:
            shifts = torch.arange(place, place + bits * count, bits, device=packed.device)
            found[source] = ((word[..., None] >> shifts & 2**bits - 1) << low).flatten(1)
            place += bits * count
        return found


@dataclass(frozen=True)
class Trits:
    """256 codes 0, 1 and 2 in 52 bytes: five in each, `run` codes apart, but in the last bytes four. They are
    the digits of a fraction of 243, highest first, which is stored as one of 256."""

    source = "codes"
    runs = ((32, 5), (16, 5), (4, 4))

    def pack(self, codes: Tensor) -> Tensor:
        """uint8 `[blocks, 256]` to bytes `[blocks, 52]`."""
        packed = []
        for part, (run, count) in zip(self._split(codes.long()), self.runs, strict=True):
            powers = 3 ** torch.arange(4, 4 - count, -1, device=codes.device)
            number = (part.unflatten(1, (count, run)) * powers[:, None]).sum(1)
            packed.append((number * 256 + 242).div(243, rounding_mode="floor"))
        return torch.cat(packed, 1).to(torch.uint8)

    def unpack(self, packed: Tensor) -> Tensor:
        """Inverse of `pack`."""
        found = []
        for part, (run, count) in zip(packed.long().split([32, 16, 4], 1), self.runs, strict=True):
            powers = 3 ** torch.arange(count, device=packed.device)
            rest = part.view(-1, 1, run) * powers[:, None] & 255
            found.append((rest * 3 >> 8).flatten(1))
        return torch.cat(found, 1).to(torch.uint8)

    def _split(self, codes: Tensor) -> tuple[Tensor, ...]:
        return codes.split([run * count for run, count in self.runs], 1)


@dataclass(frozen=True)
class SixBitPairs:
    """Eight 6-bit scales and mins in 12 bytes: the first four of each with the high bits of the last four
    above them, then the low nibbles of the last four."""

    source = "scales_and_mins"

    def pack(self, integers: Tensor) -> Tensor:
        """uint8 `[blocks, 16]` to bytes `[blocks, 12]`."""
        first, last = integers.view(-1, 2, 2, 4).unbind(2)
        nibbles = last[:, 0] & 15 | (last[:, 1] & 15) << 4
        return torch.cat([(first | last >> 4 << 6).flatten(1), nibbles], 1)

    def unpack(self, packed: Tensor) -> Tensor:
        """Inverse of `pack`."""
        high = packed[:, :8].view(-1, 2, 4)
        nibbles = torch.stack([packed[:, 8:] & 15, packed[:, 8:] >> 4], 1)
        return torch.stack([high & 63, nibbles | high >> 6 << 4], 2).flatten(1)


Part = Half | Bits | Words | Trits | SixBitPairs
D, DMIN, M = Half("d"), Half("dmin"), Half("m")
NIBBLES = Bits("codes", 0, 4, 16)
FIFTH_BITS = Bits("codes", 4, 1, 1)
BLOCKS = {
    "Q4_0": (D, NIBBLES),
    "Q4_1": (D, M, NIBBLES),
    "Q5_0": (D, FIFTH_BITS, NIBBLES),
    "Q5_1": (D, M, FIFTH_BITS, NIBBLES),
    "Q8_0": (D, Bits("codes", 0, 8, 1, flip=0x80)),
    "Q2_K": (Bits("scales_and_mins", 0, 4, 16), Bits("codes", 0, 2, 32), D, DMIN),
    "Q3_K": (
        Bits("codes", 2, 1, 32),
        Bits("codes", 0, 2, 32),
        Bits("scales", 0, 4, 8),
        Bits("scales", 4, 2, 4),
        D,
    ),
    "Q4_K": (D, DMIN, SixBitPairs(), Bits("codes", 0, 4, 32)),
    "Q5_K": (D, DMIN, SixBitPairs(), Bits("codes", 4, 1, 32), Bits("codes", 0, 4, 32)),
    "Q6_K": (
        Bits("codes", 0, 4, 64),
        Bits("codes", 4, 2, 32),
        Bits("scales", 0, 8, 1, flip=0x80),
        D,
    ),
    "IQ4_NL": (D, NIBBLES),
    "IQ4_XS": (D, Bits("scales", 4, 2, 1), Bits("scales", 0, 4, 1), NIBBLES),
    "IQ2_XXS": (D, Words(8, (("places", 0, 8, 4), ("signs", 0, 7, 4), ("scales", 0, 4, 1)))),
    "IQ2_XS": (D, Words(2, (("places", 0, 9, 1), ("signs", 0, 7, 1))), Bits("scales", 0, 4, 1)),
    "IQ2_S": (
        D,
        Bits("places", 0, 8, 1),
        Bits("signs", 0, 8, 1),
        Bits("places", 8, 2, 1),
        Bits("scales", 0, 4, 1),
    ),
    "IQ3_XXS": (D, Bits("places", 0, 8, 1), Words(4, (("signs", 0, 7, 4), ("scales", 0, 4, 1)))),
    "IQ3_S": (
        D,
        Bits("places", 0, 8, 1),
        Bits("places", 8, 1, 1),
        Bits("signs", 0, 8, 1),
        Bits("scales", 0, 4, 1),
    ),
    "IQ1_S": (
        D,
        Bits("places", 0, 8, 1),
        Words(2, (("places", 8, 3, 4), ("scales", 0, 3, 1), ("moves", 0, 1, 1))),
    ),
    "IQ1_M": (
        Bits("places", 0, 8, 1),
        Bits("moved_places", 0, 4, 1),
        Words(2, (("scales", 0, 3, 4), ("d_nibbles", 0, 4, 1))),
    ),
    "TQ1_0": (Trits(), D),
    "TQ2_0": (Bits("codes", 0, 2, 32), D),
}
SCALE_BIAS = {"Q3_K": 32, "Q6_K": 128, "IQ4_XS": 32}  # added to signed scales


def row_bytes(type_name: str, in_features: int) -> int:
    """Bytes of one row of `in_features` weights, of any type that gguf knows.

    Raises QuantkitError for an unknown type and a row that is no whole number of blocks.
    """
    block, size = _gguf().GGML_QUANT_SIZES[_type(type_name)]
    if in_features % block:
        raise QuantkitError(
            f"rows of {in_features} weights are no whole number of {type_name} blocks of {block}",
            hint="choose a type with smaller blocks",
        )
    return in_features // block * size


def encode_rows(
    type_name: str, weight: Tensor, importance: Tensor | None = None, exact: bool = True
) -> Tensor:
    """Bytes, uint8 `[rows, row_bytes]`, of `weight [rows, in]`: as ggml's own encoder has them, or with
    exact=False by a faster search. importance: `[in]`, or `[rows, in]`; see grids.ggml."""
    rows, width = weight.shape
    encoded = torch.empty(rows, row_bytes(type_name, width), dtype=torch.uint8, device=weight.device)
    if importance is not None:
        importance = importance.expand_as(weight)

    def plain(part: slice) -> None:
        encoded[part] = weight[part].to(PLAIN[type_name]).contiguous().view(torch.uint8)

    def blocks(part: slice) -> None:
        some = None if importance is None else importance[part].float()
        encoded[part] = pack(grid, *grid.quantize(weight[part].float(), some))

    grid = None if type_name in PLAIN else named(type_name, exact)
    by_chunks(blocks if grid else plain, weight)
    return encoded


def decode_rows(type_name: str, encoded: Tensor, in_features: int) -> Tensor:
    """Values, float32 `[rows, in]`, of bytes `[rows, row_bytes]` of any type that gguf can decode.

    Raises QuantkitError for another type and where the bytes are not `in_features` weights.
    """
    if encoded.shape[1:] != (row_bytes(type_name, in_features),):
        raise QuantkitError(
            f"{list(encoded.shape)} bytes are not rows of {in_features} {type_name} weights",
            hint="the file is damaged: fetch it again",
        )
    values = torch.empty(len(encoded), in_features)

    def decode(part: slice) -> None:
        blocks = encoded[part].contiguous().cpu().numpy()
        values[part] = torch.from_numpy(_gguf().quants.dequantize(blocks, _type(type_name)))

    try:
        by_chunks(decode, values)
    except NotImplementedError as error:
        raise QuantkitError(
            f"tensors of type {type_name} are not understood",
            hint=f"quantkit reads what gguf decodes: {', '.join((*PLAIN, *TYPES))} and others",
            exit_code=UNSUPPORTED,
        ) from error
    return values.to(encoded.device)


def pack(grid: BlockGrid, codes: Tensor, params: Any) -> Tensor:
    """Bytes `[out, row_bytes]` of codes uint8 `[out, in]` and parameters `[out, groups, ...]`."""
    params = flat(params)
    grouped = codes.reshape(-1, grid.group_size)
    integers = vectors.integers(grid, grouped, params) if vectors.counts(grid) else {"codes": grouped}
    if isinstance(params, SubScales | SubHalves):
        integers["scales"] = (params.scales + SCALE_BIAS.get(grid.name, 0)).to(torch.uint8)
    if isinstance(params, SubScalesAndMins):
        integers["scales_and_mins"] = torch.cat([params.scales, params.mins], 1).to(torch.uint8)
    blocks = [_packed(part, params, integers) for part in BLOCKS[grid.name]]
    return torch.cat(blocks, 1).view(len(codes), -1)


def _packed(part: Part, params: Any, integers: Mapping[str, Tensor]) -> Tensor:
    if isinstance(part, Half):
        return getattr(params, part.name).half()[:, None].view(torch.uint8)
    return part.pack(integers if isinstance(part, Words) else integers[part.source])


def unpack(grid: BlockGrid, encoded: Tensor) -> tuple[Tensor, Any]:
    """Inverse of `pack`."""
    blocks = encoded.reshape(-1, row_bytes(grid.name, grid.group_size))
    found: dict[str, Tensor] = {}
    start = 0
    for part in BLOCKS[grid.name]:
        end = start + _width(part, grid)
        piece = blocks[:, start:end].contiguous()
        start = end
        if isinstance(part, Half):
            found[part.name] = piece.view(torch.float16)[:, 0].float()
            continue
        integers = part.unpack(piece)
        for source, value in (integers if isinstance(part, Words) else {part.source: integers}).items():
            found[source] = value | found.get(source, 0)
    coded = vectors.counts(grid)
    if coded:
        found["codes"] = vectors.codes(grid, found)
    codes = found.pop("codes").view(len(encoded), -1)
    if "scales" in found:
        found["scales"] = found["scales"].float() - SCALE_BIAS.get(grid.name, 0)
    if "scales_and_mins" in found:
        found["scales"], found["mins"] = found.pop("scales_and_mins").float().chunk(2, 1)
    kinds = {frozenset(field.name for field in fields(kind)): kind for kind in PARAMS}
    kind = SubHalves if coded else kinds[frozenset(found)]
    return codes, matrix(kind(**found), len(encoded))


PARAMS = (Scale, ScaleAndMin, SubScales, SubScalesAndMins)


def _width(part: Part, grid: BlockGrid) -> int:
    """Bytes that a part of a block takes."""
    if isinstance(part, Half):
        return 2
    if isinstance(part, SixBitPairs | Trits):
        return 12 if isinstance(part, SixBitPairs) else 52
    sub_blocks = grid.group_size // grid.sub_size
    count = {"codes": grid.group_size, "scales": sub_blocks, "scales_and_mins": 2 * sub_blocks}
    count |= vectors.counts(grid)
    if isinstance(part, Words):
        source, _, _, several = part.integers[0]
        return count[source] // several * part.nbytes
    return count[part.source] * part.bits // 8


def _gguf() -> Any:
    """Imported when first needed: every checkpoint that is opened imports all layouts."""
    import gguf

    return gguf


def _type(name: str) -> Any:
    types = _gguf().GGMLQuantizationType
    if name not in types.__members__:
        raise QuantkitError(f"there is no ggml type {name}", hint=f"known are {', '.join((*PLAIN, *TYPES))}")
    return types[name]
