"""Reads calibration documents: text, JSON lines, parquet, datasets of the hub, the shipped text."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from quantkit.errors import USAGE, QuantkitError, first_line, unreadable
from quantkit.models.files.untrusted import refuse_irregular
from quantkit.options import CalibrationOptions
from quantkit.text import hub_datasets
from quantkit.text.chat import Conversation, column_of
from quantkit.text.hub_datasets import Dataset
from quantkit.text.shipped import shipped_folder

PIECE_CHARS = 1 << 14  # long texts are cut into pieces of about this size and shuffled
BUFFER = 1024  # documents in the buffer that shuffles parquet and hub datasets
JSON_LINES = (".jsonl", ".json", ".ndjson")
DATASET_CHARS = 2_000_000  # of a dataset to evaluate on: all of wikitext2's test split
HELD_OUT = {  # splits that no calibration reads
    "wikitext2": "Salesforce/wikitext@wikitext-2-raw-v1:test:text",
    "c4": "allenai/c4@en:validation:text",
}
FILES = (".txt", ".parquet", *JSON_LINES)  # names with these endings are never hub ids
ELSEWHERE = (
    "give a file, a dataset of the form ORG/NAME, or one of "
    f"{', '.join(hub_datasets.ALIASES)} to --calibration"
)

Document = str | Conversation


@dataclass(frozen=True)
class Source:
    """Documents, read on demand in an order given by the seed. dataset: set for a dataset of the hub."""

    name: str
    documents: Iterator[Document]
    dataset: Dataset | None = None


def open_source(options: CalibrationOptions, offline: bool) -> Source:
    """Open the text of `--calibration`: the shipped text, an existing path, or else a dataset of the hub.

    Raises QuantkitError if it is none of these or cannot be read, also while documents are read.
    """
    named, column, revision = options.calibration, options.text_column, options.calibration_revision
    is_file = not named or Path(named).exists() or named.endswith(FILES)
    reference = None if is_file else hub_datasets.parse(named)
    if revision is not None and reference is None:
        raise QuantkitError("--calibration-revision is for datasets of the hub", "leave it out", USAGE)
    if reference is not None:
        dataset, rows = hub_datasets.open_rows(reference, column, revision, options.seed, offline)
        documents_of = _joined if dataset.repo in hub_datasets.LINES else _documents
        documents = documents_of(rows, dataset.column)
        return Source(str(dataset), _shuffled(documents, options.seed), dataset)
    if named is None:
        return Source("shipped", _shuffled(_shipped(), options.seed, math.inf))
    path = Path(named)
    if path.suffix == ".parquet" and path.is_file():
        return Source(path.name, _shuffled(_parquet(path, column, options.seed), options.seed))
    documents = _json_lines(path, column) if path.suffix in JSON_LINES else _text(path)
    return Source(path.name, _shuffled(documents, options.seed, math.inf))


def held_out(named: Path | str | None, offline: bool = False) -> tuple[str, str]:
    """Return name and content of the text of `--text`: a file, a dataset of the hub, or None for the shipped
    held-out text. Of a dataset, the first DATASET_CHARS characters in its order; of wikitext2 the test split.

    Raises QuantkitError if it is none of these or cannot be read.
    """
    is_file = named is None or Path(named).exists() or str(named).endswith(FILES)
    if not is_file and (found := hub_datasets.parse(HELD_OUT.get(str(named), str(named)))):
        dataset, rows = hub_datasets.open_rows(found, "text", None, None, offline)
        parts, size, glue = [], 0, "" if dataset.repo in hub_datasets.LINES else "\n\n"
        for where, value in rows:
            if not isinstance(value, str):
                raise _no_text(where, str(dataset.column), [type(value).__name__])
            parts.append(value)
            size += len(value)
            if size >= DATASET_CHARS:
                break
        return str(dataset), glue.join(parts)[:DATASET_CHARS]
    path = shipped_folder("heldout") / "heldout.txt" if named is None else Path(named)
    with opened(path, "text", "check the path given to --text") as file:
        return "shipped held-out text" if named is None else path.name, file.read()


def _shipped() -> Iterator[str]:
    for path in sorted(shipped_folder("calibration").glob("*.txt")):
        yield from _cut(path.read_text(encoding="utf-8"))


def _text(path: Path) -> Iterator[str]:
    with opened(path) as file:
        yield from _cut(file.read())


def _json_lines(path: Path, column: str) -> Iterator[Document]:
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield from _json_row(line, column, f"{path}:{number}")


@contextmanager
def opened(path: Path, what: str = "calibration text", hint: str = ELSEWHERE) -> Iterator[TextIO]:
    """Open a UTF-8 text file; raise QuantkitError for errors, also while reading. what: name of the text."""
    try:
        refuse_irregular(path)
        with open(path, encoding="utf-8") as file:
            yield file
    except UnicodeDecodeError as error:
        what = f"{path} is not UTF-8 text: {error}"
        raise QuantkitError(what, "convert it, or give another file", USAGE) from error
    except OSError as error:
        raise unreadable(f"{what} {path}", error, hint) from error


def _json_row(line: str, requested: str, where: str) -> Iterator[Document]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise QuantkitError(f"{where} is not JSON: {error}", "one JSON object per line", USAGE) from error
    column = column_of(row, requested) if isinstance(row, dict) else None
    if column is None:
        raise _no_text(where, requested, row if isinstance(row, dict) else [type(row).__name__])
    value = row[column]
    # Unlike those of a dataset, rows of a file stay whole: they are shuffled all at once.
    yield from [value] if isinstance(value, str) else _documents([(where, value)], column)


def _parquet(path: Path, requested: str, seed: int) -> Iterator[Document]:
    """Yield the documents of a parquet file's column, with row groups in an order given by the seed."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            column = column_of(columns, requested)
            if column is None:
                raise _no_text(str(path), requested, columns)
            sizes = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
            order = list(range(len(sizes)))
            random.Random(seed).shuffle(order)
            for group in order:
                row = sum(sizes[:group])
                for batch in file.iter_batches(BUFFER, row_groups=[group], columns=[column]):
                    values = batch.column(0).to_pylist()
                    places = (f"{path}, row {number}" for number in itertools.count(row + 1))
                    yield from _documents(zip(places, values, strict=False), column)
                    row += len(values)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # names of columns may be broken
        what = f"{path} is not parquet that can be read: {first_line(error)}"
        raise QuantkitError(what, "write it again, or give another file", USAGE) from error


def _documents(rows: Iterable[tuple[str, Any]], column: str) -> Iterator[Document]:
    """Yield the pieces of text or conversations of rows (place, value); skip rows without a value."""
    for where, value in rows:
        if isinstance(value, str):
            yield from _cut(value)
        elif isinstance(value, list):
            yield Conversation(value, where)
        elif value is not None:
            raise _no_text(where, column, [f"{column}: {type(value).__name__}"])


def _joined(rows: Iterable[tuple[str, Any]], column: str) -> Iterator[str]:
    """Yield pieces of about PIECE_CHARS characters, made of consecutive rows."""
    piece: list[str] = []
    size = 0
    for document in _documents(rows, column):
        if not isinstance(document, str):
            raise _no_text("a row", column, [f"{column}: conversations"])
        piece.append(document)
        size += len(document)
        if size >= PIECE_CHARS:
            yield "".join(piece)
            piece, size = [], 0
    yield "".join(piece)


def _no_text(where: str, column: str, has: Iterable[str]) -> QuantkitError:
    what = f"{where} has no text under {column!r} (it has: {', '.join(has)})"
    return QuantkitError(what, "name the key or column with --text-column", USAGE)


def _cut(text: str) -> Iterator[str]:
    """Yield pieces of about PIECE_CHARS characters, cut at line ends."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE_CHARS)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def _shuffled(documents: Iterable[Document], seed: int, buffer: float = BUFFER) -> Iterator[Document]:
    """Yield documents in an order given by the seed, with at most `buffer` documents in memory."""
    source = random.Random(seed)
    kept: list[Document] = []
    for document in documents:
        if len(kept) < buffer:
            kept.append(document)
            continue
        place = source.randrange(len(kept))
        kept[place], document = document, kept[place]
        yield document
    source.shuffle(kept)
    yield from kept
