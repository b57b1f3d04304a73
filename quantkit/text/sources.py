"""Reads documents of text: plain text, JSON, CSV, parquet, datasets of the hub, the shipped text."""

import codecs
import csv
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from quantkit.errors import USAGE, QuantkitError, first_line, require, unreadable
from quantkit.models.files.untrusted import refuse_irregular
from quantkit.options import CalibrationOptions
from quantkit.text import hub_datasets, shipped_folder
from quantkit.text.chat import COLUMNS, TOOLS, Conversation, column_of
from quantkit.text.hub_datasets import Dataset

TOKEN_CHARS = 4  # of English; long texts are cut into pieces of about one sequence and shuffled
BUFFER = 1024  # documents in the buffer that shuffles parquet and hub datasets
PART_CHARS = 1 << 20
JSON = (".jsonl", ".json", ".ndjson")
CSV = {".csv": "excel", ".tsv": "excel-tab"}  # dialects of the csv module
TABLES = (".parquet", *CSV, *JSON)  # files with columns
LONGEST_FIELD = 1 << 27  # characters of a CSV file's field; the csv module's default is 131,072
DATASET_CHARS = 2_000_000  # characters of a dataset to evaluate on: all of wikitext2's test split
HELD_OUT = {  # splits that no calibration reads
    "wikitext2": "Salesforce/wikitext@wikitext-2-raw-v1:test:text",
    "c4": "allenai/c4@en:validation:text",
}
FILES = (".txt", *TABLES)  # names with these endings are never hub ids
ELSEWHERE = (
    "give a file, a dataset of the form ORG/NAME, or one of "
    f"{', '.join(hub_datasets.ALIASES)} to --calibration"
)

HALF = re.compile("[\ud800-\udfff]")  # JSON can spell it; tokenizers refuse it

Document = str | Conversation
Row = tuple[str, Any]  # where a row is, for errors, and its values by column


@dataclass(frozen=True)
class Source:
    """Documents, read on demand in an order given by the seed. dataset: set for a dataset of the hub."""

    name: str
    documents: Iterator[Document]
    dataset: Dataset | None = None


def open_source(options: CalibrationOptions, offline: bool, seqlen: int) -> Source:
    """Open the text of `--calibration`: the shipped text, an existing path, or else a dataset of the hub.
    Long texts are cut into pieces of about `seqlen` tokens, so that few sequences come from many places.

    Raises QuantkitError if it is none of these or cannot be read, also while documents are read.
    """
    named, column, revision = options.calibration, options.text_column, options.calibration_revision
    size = TOKEN_CHARS * seqlen
    require(named != "", "--calibration names no text", "leave it out for the shipped text", USAGE)
    is_file = named is None or Path(named).exists() or named.endswith(FILES)
    reference = None if is_file else hub_datasets.parse(named)
    what = "--calibration-revision is for datasets of the hub"
    require(revision is None or reference, what, "leave it out", USAGE)
    if reference is not None:
        dataset, rows = hub_datasets.open_rows(reference, column, revision, options.seed, offline)
        documents = _pieces(_documents(rows, dataset.column), size)
        if dataset.repo in hub_datasets.LINES:
            documents = _joined(documents, dataset.column, size)
        return Source(str(dataset), _shuffled(documents, options.seed), dataset)
    check_column(named, column)
    if named is None:
        return Source("shipped", _shipped(options.seed, size))
    path = Path(named)
    rows = _rows(path, column, options.seed)
    documents = _text(path, size) if rows is None else _pieces(_documents(rows, column), size)
    buffer = BUFFER if path.suffix.lower() == ".parquet" else math.inf
    return Source(path.name, _shuffled(documents, options.seed, buffer))


def held_out(
    named: Path | str | None,
    render: Callable[[Conversation], str],
    column: str = CalibrationOptions.text_column,
    offline: bool = False,
) -> tuple[str, str]:
    """Return name and content of the text of `--text`: a file, a dataset of the hub, or None for the shipped
    held-out text. Of a dataset, the first DATASET_CHARS characters in its order; of wikitext2 the test split.

    render: makes text of a conversation. Raises QuantkitError if `named` is none of these or cannot be read.
    """
    require(str(named) not in ("", "."), "--text names no text", "leave it out for the shipped text", USAGE)
    is_file = named is None or Path(named).exists() or str(named).endswith(FILES)
    limit, glue = math.inf, "\n\n"
    if not is_file and (reference := hub_datasets.parse(HELD_OUT.get(str(named), str(named)))):
        dataset, rows = hub_datasets.open_rows(reference, column, None, None, offline)
        name, column, limit = str(dataset), str(dataset.column), DATASET_CHARS
        glue = "" if dataset.repo in hub_datasets.LINES else glue
    else:
        path = shipped_folder("heldout") / "heldout.txt" if named is None else Path(named)
        name = "shipped held-out text" if named is None else path.name
        about = ("text", "check the path given to --text")
        rows = _rows(path, column, None, *about)
        if rows is None:
            with opened(path, *about) as file:
                return name, file.read()
    texts, size = [], 0
    for document in _documents(rows, column):
        texts.append(document if isinstance(document, str) else render(document))
        size += len(texts[-1])
        if size >= limit:
            return name, glue.join(texts)[: int(limit)]
    return name, glue.join(texts)


def check_column(named: Path | str | None, column: str) -> None:
    """Raise QuantkitError if a column is named of a file without columns, or of the shipped text."""
    plain = named is None or (Path(named).exists() and Path(named).suffix.lower() not in TABLES)
    what = f"--text-column {column} is for files with columns, {named or 'the shipped text'} is plain text"
    hint = f"leave it out; files with columns end in {', '.join(TABLES)}"
    require(not plain or column == CalibrationOptions.text_column, what, hint, USAGE)


def _shipped(seed: int, size: int) -> Iterator[str]:
    """Yield the shipped text in pieces of about `size` characters. All files are spread evenly: eight pieces
    of nothing but code or tables lose twice as much. The texts in `more` come last, so that short jobs do not
    depend on them."""
    source = random.Random(seed)
    for folder in ("calibration", "calibration/more"):
        placed = []
        for path in sorted(shipped_folder(folder).glob("*.txt")):
            pieces = list(_text(path, size))
            source.shuffle(pieces)
            placed += [((at + source.random()) / len(pieces), piece) for at, piece in enumerate(pieces)]
        yield from (piece for _, piece in sorted(placed))


def _text(path: Path, size: int) -> Iterator[str]:
    """Yield the pieces of a text file. It is read in parts: its pieces alone are in memory."""
    rest = ""
    with opened(path) as file:
        while part := file.read(PART_CHARS):
            pieces = list(_cut(rest + part, size))
            yield from pieces[:-2]  # where the others end may depend on the next part
            rest = "".join(pieces[-2:])
    yield from _cut(rest, size)


@contextmanager
def opened(path: Path, what: str = "calibration text", hint: str = ELSEWHERE) -> Iterator[TextIO]:
    """Open a UTF-8 text file. Raises QuantkitError, also while reading. what: name of the text."""
    try:
        refuse_irregular(path)
        with open(path, encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as error:
        why, hint = f"not UTF-8 text: {error}", "convert it, or give another file"
        if bytes(error.object[:2]) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            why = "UTF-16, not UTF-8 text"
            hint = f"convert it to UTF-8: iconv -f UTF-16 -t UTF-8 {path} > NEW"
        raise QuantkitError(f"{path} is {why}", hint, USAGE) from error
    except OSError as error:
        raise unreadable(f"{what} {path}", error, hint) from error


# ---- rows of files with columns


def _rows(path: Path, requested: str, seed: int | None, *about: str) -> Iterator[Row] | None:
    """Return the rows of a file with columns; None for other files. about: as in `opened`."""
    kind = path.suffix.lower()
    if kind == ".parquet" and path.is_file():
        return _parquet(path, requested, seed)
    if kind in CSV:
        return _csv(path, CSV[kind], *about)
    return _json(path, *about) if kind in JSON else None


def _json(path: Path, *about: str) -> Iterator[Row]:
    """Yield the rows of JSON lines, or of a single list of objects."""
    with opened(path, *about) as file:
        lines = ((f"{path}:{number}", line) for number, line in enumerate(file, start=1) if line.strip())
        for first, (where, line) in enumerate(lines):
            if not first and line.lstrip().startswith("["):
                rows = _parsed(line + file.read(), where)
                yield from ((f"{path}, row {k}", row) for k, row in enumerate(rows, start=1))
            else:
                yield where, _parsed(line, where)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "one JSON object per line, or one list of objects"
        raise QuantkitError(f"{where} is not JSON: {error}", hint, USAGE) from error


def _csv(path: Path, dialect: str, *about: str) -> Iterator[Row]:
    """Yield the rows of a CSV file, whose first line names the columns."""
    csv.field_size_limit(LONGEST_FIELD)
    with opened(path, *about) as file:
        rows = csv.DictReader(file, dialect=dialect, strict=True)
        try:
            for row in rows:
                if None in row:
                    raise csv.Error(f"more fields than the {len(rows.fieldnames)} columns of its first line")
                yield f"{path}:{rows.line_num}", row
        except csv.Error as error:
            what = f"{path}:{rows.reader.line_num} is not {path.suffix[1:].upper()}: {error}"
            hint = "write quotes inside of quotes twice; a file of prose should end in .txt"
            raise QuantkitError(what, hint, USAGE) from error


def _parquet(path: Path, requested: str, seed: int | None) -> Iterator[Row]:
    """Yield a parquet file's rows, with the columns needed. seed: order of row groups; None: as stored."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            column = column_of(columns, requested)
            if column is None:
                raise _no_text(str(path), requested, columns)
            needed = [column, *({TOOLS} & set(columns))]
            sizes = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
            order = list(range(len(sizes)))
            if seed is not None:
                random.Random(seed).shuffle(order)
            for group in order:
                number = sum(sizes[:group])
                for batch in file.iter_batches(BUFFER, row_groups=[group], columns=needed):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # names of columns may be broken
        what = f"{path} is not parquet that can be read: {first_line(error)}"
        raise QuantkitError(what, "write it again, or give another file", USAGE) from error


# ---- documents


def _documents(rows: Iterable[Row], requested: str) -> Iterator[Document]:
    """Yield the text or conversation of each row; skip rows without a value.

    Conversations and tools may be stored as JSON text."""
    for where, row in rows:
        column = column_of(row, requested) if isinstance(row, Mapping) else None
        if column is None:
            has = row if isinstance(row, Mapping) else [type(row).__name__]
            raise _no_text(where, requested, has)
        value = row[column]
        if isinstance(value, str) and column in COLUMNS and value.lstrip().startswith("["):
            value = _parsed(value, f"{column} of {where}")
        if isinstance(value, list):
            yield Conversation(value, where, _tools(row.get(TOOLS), where))
        elif isinstance(value, str):
            what = f"{column} of {where} is not Unicode: it has half of a surrogate pair"
            require(value.isascii() or not HALF.search(value), what, "leave the row out, or repair it", USAGE)
            yield value
        elif value is not None:
            raise _no_text(where, column, [f"{column}: {type(value).__name__}"])


def _tools(value: Any, where: str) -> list[Mapping[str, Any]]:
    """Return the tools of a row: JSON schemas of functions, or such schemas as JSON text."""
    source = f"{TOOLS} of {where}"
    tools = _parsed(value, source) if isinstance(value, str) and value.strip() else value or []
    tools = [tools] if isinstance(tools, Mapping) else tools
    if isinstance(tools, list):
        tools = [_parsed(tool, source) if isinstance(tool, str) else tool for tool in tools]
        if all(isinstance(tool, Mapping) for tool in tools):
            return tools
    what = f"{where} has {TOOLS} that are no list of JSON objects"
    raise QuantkitError(what, 'tools look like [{"type": "function", "function": {…}}]', USAGE)


def _pieces(documents: Iterable[Document], size: int) -> Iterator[Document]:
    """Yield documents that are not empty; texts of two or more pieces are cut."""
    for document in documents:
        if isinstance(document, str) and len(document) >= 2 * size:
            yield from _cut(document, size)
        elif document:
            yield document


def _joined(documents: Iterable[Document], column: str, size: int) -> Iterator[str]:
    """Yield pieces of about `size` characters, made of consecutive rows."""
    piece: list[str] = []
    length = 0
    for document in documents:
        if not isinstance(document, str):
            raise _no_text("a row", column, [f"{column}: conversations"])
        piece.append(document)
        length += len(document)
        if length >= size:
            yield "".join(piece)
            piece, length = [], 0
    yield "".join(piece)


def _no_text(where: str, column: str, has: Iterable[str]) -> QuantkitError:
    what = f"{where} has no text under {column!r} (it has: {', '.join(has)})"
    return QuantkitError(what, "name the key or column with --text-column", USAGE)


def _cut(text: str, size: int) -> Iterator[str]:
    """Yield pieces of `size` to twice as many characters, cut after a line, else a word, else anywhere."""
    start = 0
    while start < len(text):
        limit = start + 2 * size
        ends = (text.find(mark, start + size, limit) + 1 for mark in "\n ")
        end = next(filter(None, ends), limit)
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
        index = source.randrange(len(kept))
        kept[index], document = document, kept[index]
        yield document
    source.shuffle(kept)
    yield from kept
