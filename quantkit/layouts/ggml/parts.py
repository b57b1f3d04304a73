"""The parts of ggml blocks, bit by bit (llama.cpp, ggml-common.h).

BLOCKS lists the parts of every type in order. `pack` of a part takes its integers or floats from `values`
({name: `[blocks, n]`}) and returns bytes `[blocks, width]`. `unpack` inverts it; other parts' bits are 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Values = Mapping[str, Tensor]
NO_SIGN = 480.0  # the value of the scale byte 0xFF, which is NaN in e4m3 with a sign


@dataclass(frozen=True)
class Half:
    """A float16 parameter, `[blocks]`."""

    name: str

    def pack(self, values: Values) -> Tensor:
        return values[self.name].half()[:, None].view(torch.uint8)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        return {self.name: packed.view(torch.float16)[:, 0].float()}


class PowerOfTwo:
    """d `[blocks]` if it is half of a power of two, stored as exponent plus 127 in one byte."""

    def pack(self, values: Values) -> Tensor:
        return (torch.frexp(values["d"]).exponent + 127)[:, None].to(torch.uint8)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        exponent = packed[:, 0].to(torch.int32) - 127
        return {"d": torch.ldexp(torch.full_like(exponent, 0.5, dtype=torch.float32), exponent)}


class E4m3:
    """Scales as 8-bit floats without a sign. As in llama.cpp's code for CPUs and the `gguf` package, 0x7F is
    0 and 0xFF is NO_SIGN; no encoder writes either."""

    def pack(self, values: Values) -> Tensor:
        scales = values["scales"]
        return scales.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(scales == NO_SIGN, 0xFF)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        scales = (packed & 127).view(torch.float8_e4m3fn).float().nan_to_num_(nan=0.0)
        return {"scales": scales.masked_fill_(packed == 0xFF, NO_SIGN)}


@dataclass(frozen=True)
class Bits:
    """`bits` bits, from bit `low` on, of every integer of `source` ("codes", "scales", "scales_and_mins").

    A byte holds 8 / bits integers, the first in its lowest bits; they are `run` apart in the source. flip:
    bits of the byte that are stored inverted, which turns an unsigned byte into a signed one.
    """

    source: str
    low: int
    bits: int
    run: int
    flip: int = 0

    def pack(self, values: Values) -> Tensor:
        integers = (values[self.source] >> self.low) & 2**self.bits - 1
        parts = integers.view(len(integers), -1, 8 // self.bits, self.run).unbind(2)
        packed = parts[0] ^ self.flip
        for k, part in enumerate(parts[1:], 1):
            packed = packed | part << self.bits * k
        return packed.flatten(1).to(torch.uint8)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        grouped = (packed ^ self.flip).view(len(packed), -1, self.run)
        grouped = grouped.long() if self.low >= 8 else grouped
        mask = 2**self.bits - 1
        parts = [(grouped >> self.bits * k & mask) << self.low for k in range(8 // self.bits)]
        return {self.source: torch.stack(parts, 2).flatten(1)}


@dataclass(frozen=True)
class Words:
    """Words of `nbytes` bytes, each made of several integers, the first in the lowest bits.

    integers: `(source, bit, bits, count)`: `bits` bits, from bit `bit` on, of `count` consecutive integers.
    """

    nbytes: int
    integers: tuple[tuple[str, int, int, int], ...]

    def pack(self, values: Values) -> Tensor:
        word, bit = 0, 0
        for source, low, bits, count in self.integers:
            for integer in values[source].unflatten(1, (-1, count)).unbind(2):
                word = word | (integer.long() >> low & 2**bits - 1) << bit
                bit += bits
        return word[..., None].view(torch.uint8)[..., : self.nbytes].flatten(1)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        chunks = packed.long().unflatten(1, (-1, self.nbytes)).unbind(2)
        word, bit, integers = sum(chunk << 8 * k for k, chunk in enumerate(chunks)), 0, {}
        for source, low, bits, count in self.integers:
            shifts = torch.arange(bit, bit + bits * count, bits, device=packed.device)
            integers[source] = ((word[..., None] >> shifts & 2**bits - 1) << low).flatten(1)
            bit += bits * count
        return integers


class SixBitPairs:
    """Eight 6-bit scales and mins in 12 bytes. Bytes 0 to 7: the first four scales, then the first four mins,
    with the high bits of the last four above them. Bytes 8 to 11: the low nibbles of the last four."""

    def pack(self, values: Values) -> Tensor:
        first, last = values["scales_and_mins"].view(-1, 2, 2, 4).unbind(2)
        nibbles = last[:, 0] & 15 | (last[:, 1] & 15) << 4
        return torch.cat([(first | last >> 4 << 6).flatten(1), nibbles], 1)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        high = packed[:, :8].view(-1, 2, 4)
        nibbles = torch.stack([packed[:, 8:] & 15, packed[:, 8:] >> 4], 1)
        return {"scales_and_mins": torch.stack([high & 63, nibbles | high >> 6 << 4], 2).flatten(1)}


D, DMIN, M = Half("d"), Half("dmin"), Half("m")
NIBBLES = Bits("codes", 0, 4, 16)
FIFTH_BITS = Bits("codes", 4, 1, 1)
PLACES, SIGNS, SCALES = Bits("places", 0, 8, 1), Bits("signs", 0, 8, 1), Bits("scales", 0, 4, 1)
SIGNED_SCALES = Bits("scales", 0, 8, 1, flip=0x80)
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
    "Q6_K": (Bits("codes", 0, 4, 64), Bits("codes", 4, 2, 32), SIGNED_SCALES, D),
    "IQ4_NL": (D, NIBBLES),
    "IQ4_XS": (D, Bits("scales", 4, 2, 1), SCALES, NIBBLES),
    "IQ2_XXS": (D, Words(8, (("places", 0, 8, 4), ("signs", 0, 7, 4), ("scales", 0, 4, 1)))),
    "IQ2_XS": (D, Words(2, (("places", 0, 9, 1), ("signs", 0, 7, 1))), SCALES),
    "IQ2_S": (D, PLACES, SIGNS, Bits("places", 8, 2, 1), SCALES),
    "IQ3_XXS": (D, PLACES, Words(4, (("signs", 0, 7, 4), ("scales", 0, 4, 1)))),
    "IQ3_S": (D, PLACES, Bits("places", 8, 1, 1), SIGNS, SCALES),
    "MXFP4": (PowerOfTwo(), NIBBLES),
    "NVFP4": (E4m3(), Bits("codes", 0, 4, 8)),
}
