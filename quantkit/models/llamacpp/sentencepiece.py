"""A SentencePiece model file (`tokenizer.model`), read without the library.

Format: protocol buffers, message ModelProto of sentencepiece_model.proto. Token types have the numbers
that GGUF uses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quantkit.errors import UNSUPPORTED, QuantkitError

Message = dict[int, int | bytes]
MODEL_TYPES = {1: "Unigram", 2: "BPE", 3: "word", 4: "character"}
NORMAL, TYPES = 1, range(1, 7)  # as in `token_type` of GGUF
IDS = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, 1 << 64)}  # field and default


class Piece(NamedTuple):
    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SentencePiece:
    """What a model holds. ids: of bos, eos, unk and pad, where they are set."""

    kind: str
    pieces: list[Piece]
    ids: dict[str, int]
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    normalizer: str | None


def read(path: Path) -> SentencePiece:
    """Raises QuantkitError unless the file is a whole BPE model."""
    try:
        model = _parse(path.read_bytes())
    except (ValueError, IndexError, struct.error) as error:  # IndexError: a number that ends early
        raise QuantkitError(f"{path} is no SentencePiece model: {error}", "download it again") from error
    if model.kind != "BPE":
        raise QuantkitError(
            f"{path} is a SentencePiece {model.kind} model",
            hint="only BPE tokenizers can be exported",
            exit_code=UNSUPPORTED,
        )
    return model


def _parse(data: bytes) -> SentencePiece:
    pieces: list[Piece] = []
    trainer: Message = {}
    normalizer: Message = {}
    for field, value in _fields(data):
        if field == 1:
            piece = _message(value)
            (score,) = struct.unpack("<f", _get(piece, 2, bytes(4)))
            kind = _get(piece, 3, NORMAL)
            if kind not in TYPES:
                raise ValueError(f"a piece of type {kind}")
            pieces.append(Piece(_get(piece, 1, b"").decode(), score, kind))
        elif field == 2:
            trainer = _message(value)
        elif field == 3:
            normalizer = _message(value)
    if not pieces:
        raise ValueError("it has no pieces")
    ids = {name: _get(trainer, field, default) for name, (field, default) in IDS.items()}
    return SentencePiece(
        kind=MODEL_TYPES.get(_get(trainer, 3, 1), "unknown"),
        pieces=pieces,
        ids={name: number for name, number in ids.items() if number < len(pieces)},  # -1 is 2^64 - 1
        add_dummy_prefix=bool(_get(normalizer, 3, 1)),
        remove_extra_whitespaces=bool(_get(normalizer, 4, 1)),
        normalizer=_get(normalizer, 1, b"").decode() if _get(normalizer, 2, b"") else None,
    )


def _message(value: int | bytes) -> Message:
    if not isinstance(value, bytes):
        raise ValueError(f"a number, {value}, where a message should be")
    return dict(_fields(value))


def _get(message: Message, field: int, default):
    """The value of a field, of the default's type. Raises ValueError when it has another type."""
    value = message.get(field, default)
    if type(value) is not type(default):
        raise ValueError(f"field {field} is {value!r:.40}")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of one message. Raises ValueError where it ends early."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        match key & 7:
            case 0:
                value, place = _varint(data, place)
                yield key >> 3, value
                continue
            case 2:
                size, place = _varint(data, place)
            case 1:
                size = 8
            case 5:
                size = 4
            case wire:
                raise ValueError(f"wire type {wire} at byte {place}")
        if size > len(data) - place:
            raise ValueError(f"{size} bytes at byte {place}, {len(data) - place} are left")
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
    raise ValueError(f"a number of more than 64 bits at byte {place}")
