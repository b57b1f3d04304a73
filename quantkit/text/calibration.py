"""Turns calibration text into token sequences `[samples, seqlen]`, and records their provenance."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from quantkit.errors import USAGE, QuantkitError, count, require
from quantkit.models.files import tokenizing
from quantkit.models.files.checkpoint import Checkpoint, has_tokenizer
from quantkit.options import CalibrationOptions
from quantkit.text.chat import ChatTemplate
from quantkit.text.hub_datasets import Dataset
from quantkit.text.sources import Document, held_out, open_source

SHIPPED_SEQLEN = 512
DEFAULT_SEQLEN = 2048
HELD_BACK = 128  # maximum of tokens in a held-back sequence
HELD_OUT = 8  # one of eight sequences is held out
MOST_HELD_OUT = 32  # maximum of held-out sequences
SPELLED = 1.5  # tokens for each character; known languages take fewer than one


@dataclass(frozen=True)
class Provenance:
    """The origin of calibration tokens, from which the same tokens can be made again.

    sha256: of the token ids, int64 little-endian. bos: whether every sequence begins with BOS. chat_template:
    sha256 of the template that rendered conversations; None without conversations.
    """

    source: str
    samples: int
    seqlen: int
    seed: int
    bos: bool
    sha256: str
    chat_template: str | None
    dataset: Dataset | None
    text_column: str | None = None


@dataclass(frozen=True)
class HeldBack:
    """Tokens that a job does not calibrate on, int64 `[sequences, at most HELD_BACK]`, and the name of their
    text."""

    tokens: Tensor
    text: str


@dataclass(frozen=True)
class CalibrationSet:
    """Calibration tokens, int64 `[samples, seqlen]`, their origin, and a warning if there are too few.
    held_back: tokens of the same text after these; None if there are none."""

    tokens: Tensor
    provenance: Provenance
    warning: str | None = None
    held_back: HeldBack | None = None

    def record(self) -> dict:
        record = asdict(self.provenance)
        column = record.pop("text_column")
        return record | ({"text_column": column} if column else {})


def load(
    checkpoint: Checkpoint, options: CalibrationOptions, offline: bool = False, held_back: int = 0
) -> CalibrationSet:
    """Tokenize as much of the source as is needed and cut it into sequences.

    Documents are read in an order given by the seed, long ones in pieces, and concatenated. Shipped documents
    are left out if the tokenizer has no words for their language, such as Korean in English models. If the
    tokenizer begins texts with a BOS token, every sequence begins with it. offline: read datasets of the hub
    from the local cache. held_back: how many further tokens of the text to hold back. Raises QuantkitError if
    the text is missing, empty, or shorter than one sequence. Fewer sequences than requested give a warning.
    """
    positive = options.samples > 0 and (options.seqlen is None or options.seqlen > 1)
    require(positive, "--samples must be 1 or more, --seqlen 2 or more", "try 128 and 512", USAGE)
    shipped = options.calibration is None
    seqlen = options.seqlen or (SHIPPED_SEQLEN if shipped else DEFAULT_SEQLEN)
    if checkpoint.context is not None:
        seqlen = min(seqlen, checkpoint.context)
    source = open_source(options, offline, seqlen)
    tokenizer = checkpoint.tokenizer
    bos = begins_with_bos(tokenizer)
    with closing(source.documents) as documents:
        calibrating = options.samples * (seqlen - bos)
        usable = (each for each in documents if not (shipped and _is_spelled(tokenizer, each)))
        stream, chat_template = _take(tokenizer, usable, calibrating, held_back, bos)
    bos_token = tokenizer.bos_token_id if bos else None
    tokens = _slice(stream, options.samples, seqlen, bos_token)
    name = "the shipped text" if shipped else f"calibration text {source.name}"
    require(len(stream), f"{name} is empty", "give another text with --calibration", USAGE)
    holds = f"{name} holds {count(len(stream), 'token')}; "
    hint = "give more text with --calibration, or shorter sequences with --seqlen"
    require(len(tokens), f"{holds}one sequence needs {seqlen}", hint, USAGE)
    warnings = []
    if options.seqlen is not None and options.seqlen > seqlen:
        warnings.append(f"--seqlen {options.seqlen} is cut to the model's context, {seqlen} tokens")
    if len(tokens) < options.samples:
        needed = f"{count(options.samples, 'sequence')} of {seqlen} need {options.samples * seqlen:,}"
        warnings.append(f"{holds}{needed}: using {count(len(tokens), 'sequence')}")
    checkpoint.check_ids(tokens.unique().tolist())
    digest = hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()
    provenance = Provenance(
        source.name, len(tokens), seqlen, options.seed, bos, digest, chat_template, source.dataset,
        options.text_column if options.text_column != CalibrationOptions.text_column else None,
    )  # fmt: skip
    kept = None
    if held_back:
        rest = _held_back(checkpoint, stream[calibrating:], held_back, seqlen, bos_token)
        kept = HeldBack(rest, source.name) if len(rest) else None
    return CalibrationSet(tokens, provenance, "; ".join(warnings) or None, kept)


def shipped_held_out(checkpoint: Checkpoint, count: int, warn: Callable[[str], None]) -> HeldBack | None:
    """Return about `count` tokens of the shipped held-out text; None if the checkpoint has no tokenizer and,
    with a warning, if it does not load or is another model's."""
    try:
        tokenizer = checkpoint.tokenizer
    except QuantkitError as error:  # the job does not need it
        if has_tokenizer(checkpoint.folder):
            warn(f"the loss is not measured: {error.message}")
        return None
    name, text = held_out(None, ChatTemplate(tokenizer).render)
    bos = tokenizer.bos_token_id if begins_with_bos(tokenizer) else None
    ids = tokenizing.encode(tokenizer, text, count)
    tokens = _held_back(checkpoint, ids, count, checkpoint.context or count, bos)
    if not len(tokens):
        warn("the loss is not measured: the tokenizer has more tokens than the model")
        return None
    return HeldBack(tokens, name.removesuffix(" text"))


def _held_back(
    checkpoint: Checkpoint, stream: list[int], count: int, longest: int, bos: int | None
) -> Tensor:
    """Return at most `count` tokens in sequences of equal length, none with a token beyond the embedding."""
    length = min(HELD_BACK, longest, count)
    tokens = _slice(stream, count // length, length, bos)
    return tokens[(tokens < checkpoint.text_config.vocab_size).all(1)]


def most_held_out(samples: int) -> int:
    """Return how many sequences are held out for so many samples."""
    return min(MOST_HELD_OUT, max(1, samples // HELD_OUT))


def hold_out(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Split tokens `[samples, seqlen]` into training sequences and held-out ones (at most the last eighth).

    Documents are in random order, so the last ones represent all. A job with so many fewer `--samples` trains
    on the same sequences. Raises QuantkitError if there is only one sequence.
    """
    what = "one sequence of text is not enough: training and held-out text need one each"
    require(len(tokens) > 1, what, "give more --samples, a longer text or a shorter --seqlen", USAGE)
    count = most_held_out(len(tokens))
    return tokens[:-count], tokens[-count:]


def begins_with_bos(tokenizer) -> bool:
    """Return whether the tokenizer puts its BOS token before every text."""
    with tokenizing.explained():
        first = tokenizer("a")["input_ids"][:1]
    return tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]


def _is_spelled(tokenizer, text: str) -> bool:
    """Return whether the tokenizer spells a text byte by byte. Its model has hardly seen the language, and
    such tokens would take the place of useful ones."""
    start = text[:1000]
    return len(tokenizing.encode(tokenizer, start)) > SPELLED * len(start)


def _take(
    tokenizer, documents: Iterator[Document], needed: int, held_back: int, bos: bool
) -> tuple[list[int], str | None]:
    """Return at least `needed` tokens, or all that the text has, and the sha256 of the chat template that
    rendered these. Up to `held_back` tokens follow.

    bos: every sequence gets a BOS later, so the BOS at the beginning of documents is removed.
    """
    template = ChatTemplate(tokenizer)
    stream: list[int] = []

    def read_until(enough: int) -> None:
        for document in documents if len(stream) < enough else ():
            text = document if isinstance(document, str) else template.render(document)
            ids = tokenizing.encode(tokenizer, text, needed + held_back - len(stream) + bos)
            stream.extend(ids[1:] if bos and ids[:1] == [tokenizer.bos_token_id] else ids)
            if len(stream) >= enough:
                break

    read_until(needed)
    used = template.sha256
    with suppress(QuantkitError):  # a row after the calibration text must not end the job
        read_until(needed + held_back)
    return stream, used


def _slice(stream: list[int], samples: int, seqlen: int, bos: int | None) -> Tensor:
    """Return at most `samples` sequences, int64 `[sequences, seqlen]`, each beginning with `bos` if given."""
    body = seqlen - (bos is not None)
    count = min(samples, len(stream) // body)
    tokens = torch.tensor(stream[: count * body], dtype=torch.int64).view(count, body)
    return tokens if bos is None else torch.cat([torch.full((count, 1), bos), tokens], 1)
