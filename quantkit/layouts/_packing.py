"""Codes of a few bits in 32-bit words, as every layout of packed integers stores them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quantkit.layouts import LinearSpec, Tensors, damaged
from quantkit.layouts._late import torch

WORD, BYTE = 32, 8  # bits


def words(count: int, bits: int) -> int:
    """Return the number of words of 32 bits that hold `count` codes."""
    return -(-count * bits // WORD)


def whole_words(bits: int) -> int:
    """Return the smallest number of codes that fills whole 32-bit words."""
    return WORD // math.gcd(bits, WORD)


def no_whole_words(spec: LinearSpec, *sides: str, multiple: int | None = None) -> str | None:
    """Return why the codes along `sides` ("in_features", …) do not fill 32-bit words; None if they do.
    multiple: what the number of codes must be a multiple of; None: the smallest that fills words."""
    bits = spec.grid.bits
    fit = multiple or whole_words(bits)
    for side in sides:
        if (size := getattr(spec, side)) % fit:
            return f"{side} {size} is not a multiple of {fit}, so {bits}-bit codes fill no whole words"
    return None


def _placement(bits: int) -> list[tuple[int, int, int]]:
    """Return (value, word, shift) for each value of a period, the least whole number of words."""
    return [(k, *divmod(k * bits, WORD)) for k in range(whole_words(bits))]


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes `[n, m]` into int32 `[n * bits / 32, m]`, a little-endian bit stream down dimension 0."""
    if BYTE % bits == 0:  # whole codes in a byte: fewer operations
        codes = codes.to(torch.uint8).clone(memory_format=torch.contiguous_format)
        while bits < BYTE:
            pairs = codes.view(-1, 2, codes.shape[1])
            codes, bits = pairs[:, 0] | pairs[:, 1] << bits, 2 * bits
        of_words = codes.view(-1, WORD // BYTE, codes.shape[1]).transpose(1, 2)
        return of_words.reshape(-1).view(torch.int32).view(-1, codes.shape[1])
    period = _placement(bits)
    grouped = codes.reshape(-1, len(period), codes.shape[1])
    words = torch.zeros(
        (len(grouped), len(period) * bits // WORD, codes.shape[1]), dtype=torch.int32, device=codes.device
    )
    for value, word, shift in period:
        column = grouped[:, value].to(torch.int32)
        words[:, word] |= column << shift  # the top value wraps into the sign bit, as it should
        if shift + bits > WORD:
            words[:, word + 1] |= column >> (WORD - shift)
    return words.view(-1, codes.shape[1])


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Invert `pack`: return codes uint8 `[count, m]`. The words need not fill a whole period."""
    if BYTE % bits == 0:
        codes = words.to(torch.int32).contiguous()[..., None].view(torch.uint8)
        codes = codes.transpose(1, 2).reshape(-1, words.shape[1])
        for width in (4, 2, 1):
            if width >= bits:
                codes = torch.stack([codes & (1 << width) - 1, codes >> width], 1).view(-1, words.shape[1])
        return codes[:count]
    period = _placement(bits)
    per_period = len(period) * bits // WORD
    words = torch.nn.functional.pad(words, (0, 0, 0, -len(words) % per_period))
    grouped = words.reshape(-1, per_period, words.shape[1])
    values = torch.empty((len(grouped), len(period), words.shape[1]), dtype=torch.uint8, device=words.device)
    for value, word, shift in period:
        stream = grouped[:, word] >> shift
        if shift + bits > WORD:  # the arithmetic shift repeats the sign: keep the bits that are there
            stream = stream & (2 ** (WORD - shift) - 1) | grouped[:, word + 1] << (WORD - shift)
        values[:, value] = stream & (2**bits - 1)
    return values.view(-1, words.shape[1])[:count]


def pack_planes(codes: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """Pack codes `[n, m]` into int32 `[n * bits / 32, m]`. Each code is split into planes of `widths` bits,
    lowest bits first. Every 32 codes store the words of the first plane, then those of the next. With one
    plane the result is that of `pack`."""
    if len(widths) == 1:
        return pack(codes, widths[0])
    planes, shift = [], 0
    for width in widths:
        words = pack(codes >> shift & (2**width - 1), width)
        planes.append(words.view(-1, width, codes.shape[1]))
        shift += width
    return torch.cat(planes, 1).view(-1, codes.shape[1])


def unpack_planes(words: torch.Tensor, widths: Sequence[int], count: int) -> torch.Tensor:
    """Invert `pack_planes`: uint8 `[count, m]`. With several planes, count is a multiple of 32."""
    if len(widths) == 1:
        return unpack(words, widths[0], count)
    blocks = words.reshape(-1, sum(widths), words.shape[1])
    codes, shift = torch.zeros(count, words.shape[1], dtype=torch.uint8, device=words.device), 0
    for width, plane in zip(widths, blocks.split(list(widths), 1), strict=True):
        codes |= unpack(plane.reshape(-1, words.shape[1]), width, count) << shift
        shift += width
    return codes


def column_groups(
    tensors: Tensors, part: str, stored: torch.Tensor | None, spec: LinearSpec, device: torch.device
) -> torch.Tensor | None:
    """Return the group of each column, int64 `[in]`; None if groups are consecutive columns of equal size.

    stored: the stored group of each column, named `part` in errors; None for consecutive columns. Raises
    QuantkitError if a group number has no scale.
    """
    size, groups = spec.grid.group_size, -(-spec.in_features // spec.grid.group_size)
    trivial = torch.arange(spec.in_features, device=device) // size
    group = trivial if stored is None else stored.long()
    if group.shape != trivial.shape:
        raise damaged(tensors, f"{part} is {list(group.shape)} instead of {list(trivial.shape)}")
    if spec.in_features % size == 0 and (stored is None or torch.equal(group, trivial)):
        return None
    least, most = int(group.min()), int(group.max())
    if least < 0 or most >= groups:
        raise damaged(tensors, f"{part} names groups {least} to {most}, there are {groups}")
    return group
