"""Writing GGUF files, also in shards, one tensor after another. The format is described in gguf_file.py.

The `gguf` package's own writer packs a vocabulary value by value, demands an architecture in every file and
cannot write empty arrays.
"""

import os
import shutil
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUF_DEFAULT_ALIGNMENT as ALIGNMENT
from gguf import GGUF_VERSION, GGMLQuantizationType
from gguf import GGUFValueType as Kind

from quantkit.models.files import checksums, gguf_file, gguf_shards
from quantkit.models.files.gguf_file import MAGIC, NUMBERS, SHARD, SHARDED_TENSORS, SHARDS, tensor_bytes
from quantkit.models.files.headers import LOSS

MAX_NAME_BYTES = 63  # limit of a tensor's name; ggml's buffer has 64 bytes with the terminator
CODES = {dtype: code for code, dtype in NUMBERS.items()}
Write = Callable[[str, Iterable], None]  # of a name and chunks: bytes, memoryviews or arrays


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: `type` names a ggml type ("Q4_K"), `shape` is `[out, in]` as in torch."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor in the file."""
        return tensor_bytes(self.type, self.shape)


@contextmanager
def writing(path: Path, metadata: Mapping[str, Any], entries: Sequence[Entry]) -> Iterator[Write]:
    """Yield a function that writes the tensors of a new GGUF file, in the order of `entries` and in constant
    memory. Called with a name and chunks, it writes them to the next tensor or the rest of an unfinished one.

    The file is called `NAME.partial` until the last tensor is written. An exception removes it. Equal
    arguments give equal bytes. Integers of `metadata` become uint32 (int32 if one is negative, 64 bits if too
    large), other numbers float32 or bool; numpy values keep their type.
    """
    assert len({entry.name for entry in entries}) == len(entries), "tensor names are unique"
    left, written = deque(entries), 0

    def missing() -> str:
        return f"{left[0].name} was not written, {written} bytes of {left[0].nbytes} were"

    def write(name: str, chunks: Iterable) -> None:
        nonlocal written
        assert left[0].name == name, f"{name}: {missing()}"
        for chunk in chunks:
            written += file.write(memoryview(chunk).cast("B"))
        assert written <= left[0].nbytes, f"{name}: {written} bytes of {left[0].nbytes}"
        if written == left[0].nbytes:
            file.write(bytes(-written % ALIGNMENT))
            left.popleft()
            written = 0

    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)  # left by a killed job; a link is not written through
    try:
        with open(partial, "xb") as file:  # closing flushes, and fails on a full disk
            file.write(_header(metadata, entries))
            yield write
            assert not left, missing()
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def in_shards(entries: Sequence[Entry], shard_bytes: int | None) -> list[list[Entry]]:
    """Return the tensors of each shard, as llama-gguf-split deals them: at most `shard_bytes`, or a single
    larger tensor. None: all in one."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        nbytes = entry.nbytes + -entry.nbytes % ALIGNMENT
        if shard_bytes and shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += nbytes
    return shards


@contextmanager
def in_files(
    path: Path, metadata: Mapping[str, Any], shards: Sequence[Sequence[Entry]], repeated: Mapping[str, Any]
) -> Iterator[Write]:
    """Yield a function that writes the next tensor, as that of `writing`, to the file `path` or its shards.
    metadata: of the first shard. repeated: of every shard."""
    with ExitStack() as stack:
        writers: dict[str, Write] = {}
        total = {SHARDS: np.uint16(len(shards)), SHARDED_TENSORS: np.int32(sum(map(len, shards)))}
        for index, file in enumerate(gguf_shards.paths(path, len(shards))):
            split = {SHARD: np.uint16(index), **total} if len(shards) > 1 else {}
            keys = {**(metadata if index == 0 else {}), **repeated, **split}
            write = stack.enter_context(writing(file, keys, shards[index]))
            writers |= {entry.name: write for entry in shards[index]}
        yield lambda name, chunks: writers[name](name, chunks)


def with_text(source: Path, target: Path, key: str, text: str) -> int:
    """Copy a GGUF file and set `key` of its metadata to `text`. All other metadata and the tensors keep their
    bytes. Returns by how many bytes the tensors move."""
    header = gguf_file.read_whole_header(source)
    entry, places = _packed(key) + _value(text), header.places
    with open(source, "rb") as old, open(target, "wb") as new:
        head = old.read(header.end)
        if key in places:
            start, stop = places[key]
            head = head[:start] + entry + head[stop:]
        else:
            last = max((stop for _, stop in places.values()), default=24)
            counts = struct.pack("<Q", len(places) + 1)
            head = head[:16] + counts + head[24:last] + entry + head[last:]
        head += bytes(-len(head) % header.alignment)
        new.write(head)
        old.seek(header.tensors)
        shutil.copyfileobj(old, new, 1 << 22)
    return len(head) - header.tensors


def fill(path: Path, key: str, text: str) -> None:
    """Write a text into a GGUF file's metadata, where space is reserved for it; nothing without `key`."""
    header = gguf_file.read_whole_header(path)
    if span := header.places.get(key):
        room = len(header.metadata[key])
        data = text.encode().ljust(room)
        assert len(data) == room, f"{key} has {room} bytes: {text}"
        with open(path, "r+b") as file:
            file.seek(span[1] - room)  # the text is at the end of its entry
            file.write(data)


def seal(path: Path) -> None:
    """Write the sha256 of a GGUF file into its metadata, where space is reserved for the sum."""
    header = gguf_file.read_whole_header(path)
    for key in header.places.keys() & {checksums.IN_FILE, checksums.IN_SHARD}:
        fill(path, key, sum_of(path, header))


def sum_of(path: Path, header: gguf_file.Header, listen: Callable[[int], None] = lambda nbytes: None) -> str:
    """Return the sha256 of a GGUF file, with zeros for the sum and the loss; listen as in `checksums.add`."""
    with open(path, "rb") as file:
        head = bytearray(file.read(header.tensors))
    for key in header.places.keys() & {checksums.IN_FILE, checksums.IN_SHARD, LOSS}:
        start, stop = header.places[key]
        head[start:stop] = bytes(stop - start)
    return checksums.of_file(path, head, listen)


def _header(metadata: Mapping[str, Any], entries: Sequence[Entry]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", GGUF_VERSION, len(entries), len(metadata))]
    for key, value in metadata.items():
        parts += [_packed(key), _value(value)]
    offset = 0
    for entry in entries:
        assert len(entry.name.encode()) <= MAX_NAME_BYTES, f"{entry.name} is too long a name"
        shape = _ggml_shape(entry.shape)
        code = GGMLQuantizationType[entry.type]
        parts += [_packed(entry.name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, offset)]
        offset += entry.nbytes + -entry.nbytes % ALIGNMENT
    header = b"".join(parts)
    return header + bytes(-len(header) % ALIGNMENT)


def _ggml_shape(shape: Sequence[int]) -> list[int]:
    """Return the sizes of a tensor, columns first, without leading dimensions of 1: readers expect a vector
    for a matrix of one row, such as the gate of a shared expert."""
    sizes = list(shape[::-1])
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return sizes


def _packed(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Return the bytes of a metadata value: its type, then the value."""
    if isinstance(value, str):
        return struct.pack("<I", Kind.STRING) + _packed(value)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
        return struct.pack("<IIQ", Kind.ARRAY, Kind.STRING, len(value)) + b"".join(map(_packed, value))
    array = _numbers(value)
    code = CODES[array.dtype.newbyteorder("<")]
    if array.ndim == 0:
        return struct.pack("<I", code) + array.tobytes()
    assert array.ndim == 1
    return struct.pack("<IIQ", Kind.ARRAY, code, len(array)) + array.tobytes()


def _numbers(value: Any) -> np.ndarray:
    """Return numbers in the type they are stored in, little-endian."""
    array = np.asarray(value)
    if not isinstance(value, (np.ndarray, np.generic)):
        if array.dtype.kind == "i":
            low, high = array.min(initial=0), array.max(initial=0)
            narrow, wide = ("<i4", "<i8") if low < 0 else ("<u4", "<u8")
            limits = np.iinfo(narrow)
            array = array.astype(narrow if limits.min <= low and high <= limits.max else wide)
        elif array.dtype.kind == "f":
            array = array.astype("<f4")
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
