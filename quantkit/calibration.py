"""Calibration text to token sequences `[samples, seqlen]`, with their provenance."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.errors import NOT_FOUND, USAGE, QuantkitError
from quantkit.options import CalibrationOptions
from quantkit.shipped import shipped_folder

SHIPPED_SEQLEN = 512
DEFAULT_SEQLEN = 2048
PIECE_CHARS = 1 << 14  # a long text is taken in pieces of about this size, in seeded order


@dataclass(frozen=True)
class Provenance:
    """Where the calibration tokens came from. `sha256` is that of the token block, int64 little-endian."""

    source: str
    samples: int
    seqlen: int
    seed: int
    bos: bool
    sha256: str


@dataclass(frozen=True)
class CalibrationSet:
    """tokens: int64 `[samples, seqlen]`."""

    tokens: Tensor
    provenance: Provenance
    warning: str | None = None

    def record(self) -> dict:
        return asdict(self.provenance)


def load(checkpoint: Checkpoint, options: CalibrationOptions) -> CalibrationSet:
    """Tokenize as much of the source as is needed and slice it into sequences.

    Documents are taken in seeded order and concatenated; where the tokenizer begins texts with a BOS
    token, every sequence begins with it. Raises QuantkitError when the text is missing, empty, or
    holds less than one sequence; with fewer sequences than asked for, the set carries a warning.
    """
    if options.samples < 1 or (options.seqlen is not None and options.seqlen < 2):
        raise QuantkitError("--samples and --seqlen must be positive", "try 128 and 512", USAGE)
    shipped = options.calibration is None
    seqlen = options.seqlen or (SHIPPED_SEQLEN if shipped else DEFAULT_SEQLEN)
    if checkpoint.context is not None:
        seqlen = min(seqlen, checkpoint.context)
    pieces = list(_shipped_pieces() if shipped else _pieces(Path(options.calibration), options))
    random.Random(options.seed).shuffle(pieces)
    tokens, found, bos = _slice(checkpoint.tokenizer, pieces, options.samples, seqlen)
    source = "shipped" if shipped else Path(options.calibration).name
    if not len(tokens):
        raise QuantkitError(
            f"calibration text {source} holds {found} tokens; one sequence needs {seqlen}",
            hint="give more text with --calibration, or shorter sequences with --seqlen",
            exit_code=USAGE,
        )
    warning = None
    if options.seqlen is not None and options.seqlen > seqlen:
        warning = f"--seqlen {options.seqlen} is cut to the model's context, {seqlen} tokens"
    if len(tokens) < options.samples and not shipped:
        warning = (
            f"calibration text {source} holds {found} tokens; {options.samples} sequences of {seqlen} need "
            f"{options.samples * seqlen}: using {len(tokens)} sequences"
        )
    digest = hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()
    provenance = Provenance(source, len(tokens), seqlen, options.seed, bos, digest)
    return CalibrationSet(tokens, provenance, warning)


def _shipped_pieces() -> Iterator[str]:
    for path in sorted(shipped_folder("calibration").glob("*.txt")):
        yield from _cut(path.read_text(encoding="utf-8"))


def _pieces(path: Path, options: CalibrationOptions) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as file:
            if path.suffix not in (".jsonl", ".json", ".ndjson"):
                yield from _cut(file.read())
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _row(line, options.text_column, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise QuantkitError(
            f"{path} is not UTF-8 text: {error}", hint="convert it, or give another file", exit_code=USAGE
        ) from error
    except OSError as error:
        raise QuantkitError(
            f"calibration text {path} cannot be read: {error.strerror}",
            hint="check the path given to --calibration",
            exit_code=NOT_FOUND,
        ) from error


def _row(line: str, column: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise QuantkitError(f"{where} is not JSON: {error}", "one JSON object a line", USAGE) from error
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise QuantkitError(
            f"{where} has no text under {column!r} (it has: {keys})",
            hint="name the key with --text-column",
            exit_code=USAGE,
        )
    return row[column]


def _cut(text: str) -> Iterator[str]:
    """Pieces of about PIECE_CHARS, cut at line ends."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE_CHARS)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def begins_with_bos(tokenizer) -> bool:
    """Whether the tokenizer puts its BOS token before every text."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def _slice(tokenizer, pieces: list[str], samples: int, seqlen: int) -> tuple[Tensor, int, bool]:
    """Sequences int64 `[≤ samples, seqlen]`, the tokens found, and whether sequences begin with BOS."""
    bos = begins_with_bos(tokenizer)
    body = seqlen - bos
    stream: list[int] = []
    for piece in pieces:
        stream.extend(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
        if len(stream) >= samples * body:
            break
    count = min(samples, len(stream) // body)
    tokens = torch.tensor(stream[: count * body], dtype=torch.int64).view(count, body)
    if bos:
        tokens = torch.cat([torch.full((count, 1), tokenizer.bos_token_id), tokens], 1)
    return tokens, len(stream), bos
