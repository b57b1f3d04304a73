"""Tokenize texts of any length.

A tokenizer takes a hundred times the memory of its text, so a long text is tokenized in pieces. A text is
cut after a line end where the ids on both sides are the same with and without the cut, so the pieces have the
ids of the whole text. Each piece but the first gets a line `LEAD` in front, because many tokenizers treat
the start of a text differently; the ids of `LEAD` are removed again. If no such place exists in `LONGEST`
characters (one endless line), the cut comes at a space, or else anywhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quantkit.errors import UNSUPPORTED, QuantkitError, first_line

PIECE_CHARACTERS = 1 << 16  # characters of a piece, extended to the next line end
LONGEST = 1 << 19  # characters of a piece in which no cut is possible
AROUND = 64  # characters on either side that are tokenized to test a cut
CUTS_TRIED = 16
LEAD = "a\n"


def encode(tokenizer: Any, text: str, limit: int | None = None) -> list[int]:
    """Return the token ids of a text without special tokens; only the first `limit` ids if given.

    Raises QuantkitError if the tokenizer fails on the text.
    """
    with explained():
        ids: list[int] = []
        start = 0
        while start < len(text) and (limit is None or len(ids) < limit):
            end = _end(tokenizer, text, start)
            piece = text[start:end]
            ids += _after(tokenizer, piece) if start else _ids(tokenizer, piece)
            start = end
        return ids[:limit]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _after(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text as a continuation of another text."""
    lead, ids = _ids(tokenizer, LEAD), _ids(tokenizer, LEAD + text)
    return ids[len(lead) :] if ids[: len(lead)] == lead else _ids(tokenizer, text)


def _end(tokenizer: Any, text: str, start: int) -> int:
    """Return the end of the piece that begins at `start`."""
    if len(text) - start <= 2 * PIECE_CHARACTERS:
        return len(text)
    limit = min(start + LONGEST, len(text))
    for mark, kept in (("\n", 1), (" ", 0)):  # a line end belongs to the piece, a space to the next one
        at = start + PIECE_CHARACTERS - 1
        for _ in range(CUTS_TRIED):
            at = text.find(mark, at + 1, limit)
            if at < 0:
                break
            if _may_cut(tokenizer, text, at + kept):
                return at + kept
        if limit == len(text):  # short enough for one piece
            break
    return limit


def _may_cut(tokenizer: Any, text: str, at: int) -> bool:
    """Return whether a cut at `at` leaves the ids around it unchanged."""
    left, right = text[max(0, at - AROUND) : at], text[at : at + AROUND]
    if not (left.strip() and right.strip()):
        return False  # the nearest visible characters are further away
    apart = _after(tokenizer, left) + _after(tokenizer, right)
    return _after(tokenizer, left + right) == apart


@contextmanager
def explained() -> Iterator[None]:
    """Turn errors of tokenizers, including panics of the library, into QuantkitError."""
    try:
        yield
    except QuantkitError:
        raise
    except BaseException as error:
        panicked = type(error).__name__ == "PanicException"  # raised by Rust code; not an Exception
        if not panicked and (not isinstance(error, Exception) or isinstance(error, MemoryError)):
            raise
        hint = "its tokenizer.json is damaged or not to be trusted: download it again"
        raise QuantkitError(f"the model's tokenizer fails: {first_line(error)}", hint, UNSUPPORTED) from error
