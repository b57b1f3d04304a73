"""Reading GGUF files, also in shards. Every size is checked before it is used. gguf_writer.py writes them.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little-endian: magic, version,
counts, metadata, one entry per tensor (name, dimensions with the fastest first, type, offset), then the
tensors, each at a multiple of the alignment. The `gguf` package knows the types and their sizes, but its
reader checks no sizes. Nothing here imports torch.
"""

import math
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFReader
from gguf import GGUFValueType as Kind

from quantkit.errors import NOT_FOUND, UNSUPPORTED, name_all, require, unreadable
from quantkit.models.files import gguf_shards, untrusted
from quantkit.models.files.safetensors_folder import LONGEST_TENSOR, TensorInfo, broken

MAGIC = b"GGUF"
MAX_METADATA_BYTES = 1 << 28  # twenty times the metadata of a vocabulary of 262,144 tokens
MAX_ITEMS = 1 << 22  # limit of all arrays together: sixteen vocabularies of 262,144 tokens
MAX_ENTRIES = 1 << 16  # limit of tensors and of keys: twenty times the largest models'
MAX_DIMENSIONS = 4
SHARD, SHARDS, SHARDED_TENSORS = "split.no", "split.count", "split.tensors.count"  # shards count from 0
MIXED = "shards must keep their names, NAME-00001-of-00003.gguf, and be of one model: download them again"
NUMBERS = {  # GGUF value type -> type in the file
    kind.value: np.dtype(dtype).newbyteorder("<") for kind, dtype in GGUFReader.gguf_scalar_to_np.items()
}
TYPES = {type.value: type.name for type in GGMLQuantizationType}
Metadata = dict[str, Any]  # key -> str, bool, int, float, or a list or numpy array of those
_broken = partial(broken, form="GGUF")


def tensor_bytes(type: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor `[..., in]`. Raises ValueError if the type's blocks do not divide `in`."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    if shape[-1] % block:
        raise ValueError(f"{shape[-1]} columns are no whole blocks of {block} ({type})")
    return math.prod(shape) // block * size


@dataclass(frozen=True)
class Header:
    """A file's header. places: {key: byte range of the metadata entry, with its key}. end: byte after the
    header. tensors: offset of the first tensor in bytes."""

    metadata: Metadata
    infos: dict[str, TensorInfo]
    places: dict[str, tuple[int, int]]
    end: int
    alignment: int
    tensors: int


def read_header(path: Path) -> tuple[Metadata, dict[str, TensorInfo]]:
    """Return the metadata, and file and offset of every tensor. path: of a file, or of any of its shards.

    Raises QuantkitError as `read_whole_header` does, or naming the shard that is missing or out of place.
    """
    metadata: Metadata = {}
    infos: dict[str, TensorInfo] = {}
    shards = gguf_shards.of(path)
    fetch = f"hf download REPO --include '{gguf_shards.whole(path).stem}-*-of-*.gguf' --local-dir ."
    count = len(shards)
    for index, file in enumerate(shards):
        what = f"{file} is missing, one of {count} shards"
        hint = f"put all shards into one folder: {fetch}"
        require(count == 1 or file.is_file(), what, hint, NOT_FOUND)
        header = read_whole_header(file)
        number, total = header.metadata.get(SHARD, 0), header.metadata.get(SHARDS, 0)
        what = f"{file} has {SHARD} {number} and {SHARDS} {total}, its name says {index} and {count}"
        require((number, total) == (index, count) or (count == 1 and total in (0, 1)), what, MIXED)
        twice = name_all(infos.keys() & header.infos.keys())
        require(not twice, f"{file} holds tensors of another shard: {twice}", MIXED)
        metadata, infos = metadata or header.metadata, infos | header.infos
    said = metadata.get(SHARDED_TENSORS) if count > 1 else len(infos)
    require(said == len(infos), f"{shards[0]} names {said} tensors, its shards hold {len(infos)}", MIXED)
    return metadata, infos


def read_whole_header(path: Path) -> Header:
    """Return the header of one file; shapes are `[out, in]` as in torch.

    Raises QuantkitError naming the file if it is a Git LFS pointer, not GGUF or cut short, or if its header
    contradicts itself or the file's size.
    """
    try:
        untrusted.refuse_pointer(path)
        if not path.stat().st_size:
            raise _broken(path, "it is empty")
        with open(path, "rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            # not the whole file: under `ulimit -v` a large model could not be mapped
            length = min(file_bytes, MAX_METADATA_BYTES)
            with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ) as mapped:
                with memoryview(mapped) as data:
                    return _parse(_Cursor(path, data, file_bytes))
    except OSError as error:
        raise unreadable(path, error, "check the path") from error


@dataclass
class _Cursor:
    """A position in the header. Raises QuantkitError if it would pass the end."""

    path: Path
    data: memoryview
    file_bytes: int
    position: int = 0
    items: int = 0

    def take(self, nbytes: int) -> int:
        """Return the current position and move it by `nbytes`."""
        start = self.position
        if nbytes > len(self.data) - start:
            if start + nbytes > self.file_bytes:
                raise _broken(self.path, f"its header is longer than its {self.file_bytes} bytes")
            raise _broken(self.path, f"its header is longer than {MAX_METADATA_BYTES} bytes")
        self.position += nbytes
        return start

    def unpack(self, form: str) -> tuple:
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form)))

    def text(self) -> str:
        (length,) = self.unpack("<Q")
        start = self.take(length)
        return str(self.data[start : start + length], "utf-8", "surrogateescape")

    def numbers(self, code: int, count: int) -> np.ndarray:
        dtype = NUMBERS.get(code)
        if dtype is None:
            raise _broken(self.path, f"value type {code} at byte {self.position} is unknown")
        start = self.take(count * dtype.itemsize)
        return np.frombuffer(bytes(self.data[start : self.position]), dtype)

    def value(self) -> Any:
        (code,) = self.unpack("<I")
        if code == Kind.STRING:
            return self.text()
        if code != Kind.ARRAY:
            return self.numbers(code, 1)[0].item()
        code, count = self.unpack("<IQ")
        if code == Kind.STRING and count > (len(self.data) - self.position) // 8:
            raise _broken(self.path, f"it cannot hold {count} strings after byte {self.position}")
        self.items += count
        if self.items > MAX_ITEMS and count <= len(self.data) - self.position:
            raise _broken(self.path, f"its arrays have {self.items:,} items")
        if code != Kind.STRING:
            return self.numbers(code, count).tolist()
        return [self.text() for _ in range(count)]


def _parse(cursor: _Cursor) -> Header:
    path = cursor.path
    start = cursor.take(4)
    if bytes(cursor.data[start:4]) != MAGIC:
        raise _broken(path, "it does not begin with GGUF")
    (version,) = cursor.unpack("<I")
    why = "is big-endian" if version & 0xFFFF == 0 else f"has GGUF version {version}"
    require(version in (2, 3), f"{path} {why}", "quantkit reads versions 2 and 3, little-endian", UNSUPPORTED)
    tensors, pairs = cursor.unpack("<QQ")
    for count, words in ((tensors, "tensors"), (pairs, "keys")):
        if count > MAX_ENTRIES:
            raise _broken(path, f"it says {count:,} {words}, at most {MAX_ENTRIES:,} are read")
    metadata: Metadata = {}
    places = {}
    for _ in range(pairs):
        start, key = cursor.position, cursor.text()
        if key in metadata:
            raise _broken(path, f"the key {key} comes twice")
        metadata[key] = cursor.value()
        places[key] = start, cursor.position
    infos = [_info(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise _broken(path, f"its alignment is {alignment}")
    end = cursor.position
    base = end + -end % alignment
    return Header(metadata, _placed(cursor, infos, base, alignment), places, end, alignment, base)


def _info(cursor: _Cursor) -> TensorInfo:
    """Return a tensor of the header; its offset still counts from the first tensor."""
    name = cursor.text()
    if len(name) > LONGEST_TENSOR:
        raise _broken(cursor.path, f"a tensor has a name of {len(name):,} characters")
    (count,) = cursor.unpack("<I")
    if not 1 <= count <= MAX_DIMENSIONS:
        raise _broken(cursor.path, f"{name} has {count} dimensions")
    shape = cursor.unpack(f"<{count}Q")[::-1]
    code, offset = cursor.unpack("<IQ")
    what = f"{name} of {cursor.path} has type {code}, which is unknown"
    require(code in TYPES, what, "a newer gguf package may know it: pip install -U gguf", UNSUPPORTED)
    type = TYPES[code]
    try:
        nbytes = tensor_bytes(type, shape)
    except ValueError as error:
        raise _broken(cursor.path, f"{name}: {error}") from error
    if nbytes == 0:
        raise _broken(cursor.path, f"{name} is empty: {list(shape)}")
    return TensorInfo(name, type, shape, cursor.path, offset, nbytes)


def _placed(cursor: _Cursor, infos: list[TensorInfo], base: int, alignment: int) -> dict[str, TensorInfo]:
    """Return the tensors by name, with offsets from the beginning of the file. Raises QuantkitError if any
    lie outside the file or overlap. base: offset of the first tensor."""
    path, end = cursor.path, base
    placed: dict[str, TensorInfo] = {}
    for info in sorted(infos, key=lambda info: info.offset):
        start = base + info.offset
        if info.offset % alignment or start < end:
            raise _broken(path, f"{info.name} begins at byte {start}, where it cannot")
        end = start + info.nbytes
        if end > cursor.file_bytes:
            raise _broken(path, f"{info.name} ends at byte {end}, the file has {cursor.file_bytes}")
        if info.name in placed:
            raise _broken(path, f"the tensor {info.name} comes twice")
        placed[info.name] = replace(info, offset=start)
    return {info.name: placed[info.name] for info in infos}
