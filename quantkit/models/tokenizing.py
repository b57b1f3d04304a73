"""Text to token ids, by tokenizers that strangers wrote and of texts of any length.

A tokenizer takes a hundred times the memory of what it is given, so a long text goes in pieces. They are cut
behind line ends, and only there where the tokenizer says of the characters around that it makes no
difference: the ids are those of the whole. Each piece but the first is read behind a line of its own, `LEAD`,
whose ids are taken away again, because many tokenizers begin a text otherwise than a line. Where there is no
such place in `LONGEST` characters (one line without end), it is cut at such a space, else right there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.errors import UNSUPPORTED, QuantkitError, first_line
from quantkit.models.files import untrusted

PIECE = 1 << 16  # characters of a piece, and on to the next line end
LONGEST = 1 << 19  # of a piece without a place to cut it
AROUND = 64  # characters on either side of a cut that are tokenized to see whether it is one
TRIES = 16
LEAD = "a\n"
LARGEST_ID = 1 << 24  # of a token: sixty times that of the largest vocabulary
SUSPICIOUS = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]|[:,\[]\s*\d{8,}\s*[,}\]]')
GROWTH = 64  # characters that a normalizer may make of one; NFKC makes 18 of the worst


def encode(tokenizer: Any, text: str, limit: int | None = None) -> list[int]:
    """Token ids of a text, without special tokens; of its first `limit` where that is given.

    Raises QuantkitError for a tokenizer that cannot read it.
    """
    with explained():
        ids: list[int] = []
        start = 0
        while start < len(text) and (limit is None or len(ids) < limit):
            end = _end(tokenizer, text, start)
            piece = text[start:end]
            ids += _behind(tokenizer, piece) if start else _ids(tokenizer, piece)
            start = end
        return ids[:limit]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _behind(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that does not begin one."""
    lead, found = _ids(tokenizer, LEAD), _ids(tokenizer, LEAD + text)
    return found[len(lead) :] if found[: len(lead)] == lead else _ids(tokenizer, text)


def _end(tokenizer: Any, text: str, start: int) -> int:
    """Where the piece ends that begins at `start`."""
    if len(text) - start <= 2 * PIECE:
        return len(text)
    at = start + PIECE
    for _ in range(TRIES):
        at = text.find("\n", at, start + LONGEST) + 1
        if not at:
            break
        if _may_cut(tokenizer, text, at):
            return at
    if len(text) - start <= LONGEST:
        return len(text)
    space = start + LONGEST
    for _ in range(TRIES):
        space = text.rfind(" ", start + PIECE, space)
        if space < 0:
            break
        if _may_cut(tokenizer, text, space):
            return space
    return start + LONGEST


def _may_cut(tokenizer: Any, text: str, at: int) -> bool:
    """Whether the ids around a place are the same with a cut there."""
    left, right = text[max(0, at - AROUND) : at], text[at : at + AROUND]
    if not (left.strip() and right.strip()):
        return False  # what matters may lie further away
    apart = _behind(tokenizer, left) + _behind(tokenizer, right)
    return _behind(tokenizer, left + right) == apart


@contextmanager
def explained() -> Iterator[None]:
    """Turn what tokenizers raise for a text, panics of the library among it, into QuantkitError."""
    try:
        yield
    except QuantkitError:
        raise
    except BaseException as error:
        panicked = type(error).__name__ == "PanicException"  # of Rust: no Exception
        if not panicked and (not isinstance(error, Exception) or isinstance(error, MemoryError)):
            raise
        raise QuantkitError(
            f"the model's tokenizer fails: {first_line(error)}",
            "its tokenizer.json is damaged or not to be trusted: download it again",
            UNSUPPORTED,
        ) from error


def refuse_file(path: Path) -> None:
    """Raise QuantkitError for a tokenizer.json that would abort the process: the library takes as much memory
    as the largest id says, and what it calls the prefix from the second part of every merge, whether it is
    there or not."""
    if not path.is_file():
        return
    data = path.read_bytes()
    if not SUSPICIOUS.search(data):  # parsing the largest of them takes a second
        return
    try:
        content = untrusted.parse(data)
        model = content["model"]
        vocabulary = model.get("vocab") or {}
        ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else ())]
        ids += [token["id"] for token in content.get("added_tokens") or ()]
        large = [number for number in ids if number > LARGEST_ID]
        prefix = model.get("continuing_subword_prefix") or ""
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
        lacking = [second for _, second in pairs if not second.startswith(prefix)]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _refused(path, f"is not understood: {error!r}") from error
    if large:
        raise _refused(path, f"gives a token the id {large[0]}")
    if lacking:
        raise _refused(path, f"has merges without its continuing_subword_prefix {prefix!r}")


def _refused(path: Path, why: str) -> QuantkitError:
    hint = "it is damaged or not to be trusted: download it again"
    return QuantkitError(f"{path} {why}", hint, UNSUPPORTED)


def refuse_growth(tokenizer: Any) -> None:
    """Raise QuantkitError for a tokenizer whose normalizer writes far more text than it is given."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = getattr(backend, "normalizer", None)
    if normalizer is None:
        return
    grown = _growth(json.loads(normalizer.__getstate__()))
    if grown > GROWTH:
        raise QuantkitError(
            f"the model's tokenizer makes up to {min(grown, 1e9):,.0f} characters of one",
            "its tokenizer.json is damaged or not to be trusted: download it again",
            UNSUPPORTED,
        )


def _growth(normalizer: dict) -> float:
    """Characters that a normalizer may make of one."""
    factor = 1.0
    for part in normalizer.get("normalizers") or ():
        factor *= _growth(part)
    written = len(normalizer.get("content") or "")
    pattern = normalizer.get("pattern") or {}
    if "String" in pattern:
        return factor * max(1.0, written / max(1, len(pattern["String"])))
    prepended = len(normalizer.get("prepend") or "") / PIECE  # once a text
    return factor * max(1.0, (written + 1.0) if pattern else 1.0) + prepended
