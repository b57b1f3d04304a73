"""A folder of safetensors files: headers read and checked, tensors copied as raw bytes.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, a JSON header
`{name: {dtype, shape, data_offsets}}`, then the tensors without holes).
Nothing here imports torch: sizes are known, and files merged, without loading a tensor.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import NOT_FOUND, UNSUPPORTED, QuantkitError, name_all, require, unreadable
from quantkit.layouts import DTYPE_BYTES
from quantkit.models.files import untrusted

MIXED = "index and shards belong to different downloads; fetch both again"
CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 1 << 25  # a third of the safetensors library's limit
MAX_TENSORS = 1 << 18  # in a file; Kimi K2 has 208,000 in 62 files
TENSOR_VALUES = 12  # brackets and commas of a header's entry with up to five dimensions
MAX_DIMENSIONS = 64  # torch's limit
LONGEST_NAME = 255  # bytes of a file's name
LONGEST_TENSOR = 1024  # characters of a tensor's name
COPY_BYTES = 1024 * 1024  # a piece stays in the processor's cache between read and write


@dataclass(frozen=True)
class TensorInfo:
    """Location of one stored tensor: `nbytes` bytes at `offset` of `file`, with dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def natural(name: str) -> list:
    """Return a sort key that puts block 2 before block 10."""
    return [part.zfill(LONGEST_TENSOR) if k % 2 else part for k, part in enumerate(re.split(r"(\d+)", name))]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor of one safetensors file, from its header alone.

    Raises QuantkitError naming the file if it is a Git LFS pointer, the header is malformed, a size does not
    fit its dtype and shape, or the tensors do not fill the file without holes.
    """
    try:
        untrusted.refuse_pointer(path)
        file_bytes = path.stat().st_size
        if not file_bytes:
            raise broken(path, "it is empty")
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or length > file_bytes - 8:
                raise broken(path, f"its header should be {length} bytes, the file has {file_bytes}")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"{length:,} bytes, at most {MAX_HEADER_BYTES:,} are read")
            header = untrusted.parse(file.read(length), TENSOR_VALUES * MAX_TENSORS)
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise _malformed(path, error) from error
    return check_header(path, header, file_bytes, 8 + length)


def check_header(
    path: Path, header: dict, file_bytes: int | None = None, base: int = 0
) -> dict[str, TensorInfo]:
    """Return every tensor of a parsed header, for a file whose tensors begin at byte `base`.

    file_bytes: size of the file; None: the end is not checked. Raises as `read_header` does.
    """
    try:
        header.pop("__metadata__", None)
        infos = {name: _info(path, base, name, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _malformed(path, error) from error
    end = base
    for info in sorted(infos.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            raise broken(path, f"{info.name} begins at byte {info.offset} instead of {end}")
        end += info.nbytes
    if file_bytes is not None and end != file_bytes:
        raise broken(path, f"its tensors end at byte {end}, the file has {file_bytes}")
    return infos


def _info(path: Path, base: int, name: str, entry: dict) -> TensorInfo:
    if len(name) > LONGEST_TENSOR:
        raise ValueError(f"a name of {len(name):,} characters: {name[:40]}…")
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    nbytes = end - start
    if not isinstance(entry["dtype"], str):
        raise ValueError(f"{name}: no dtype")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{name}: {len(shape)} dimensions")
    if not all(type(size) is int and size >= 0 for size in (start, end, nbytes, *shape)):
        raise ValueError(f"{name}: sizes must be whole numbers")
    if entry["dtype"] in DTYPE_BYTES and nbytes != math.prod(shape) * DTYPE_BYTES[entry["dtype"]]:
        raise ValueError(f"{name}: {nbytes} bytes do not hold {entry['dtype']} {list(shape)}")
    return TensorInfo(name, entry["dtype"], shape, path, base + start, nbytes)


def _malformed(path: Path, error: Exception) -> QuantkitError:
    return broken(path, f"its header is not a safetensors header ({error})")


def broken(path: Path, why: str, form: str = "safetensors") -> QuantkitError:
    """Return the error for a file that contradicts its header."""
    what = f"{path} is truncated or not {form}: {why}"
    return QuantkitError(what, "download or copy the file again and compare its size with the original")


def read_json(path: Path) -> dict:
    """Return a parsed JSON object. Raises QuantkitError for anything else (exit code 3 if it is absent)."""
    gguf = min(path.parent.glob("*.gguf"), default="a GGUF file")
    hint = f"give a checkpoint folder, {gguf} or a hub id"
    require(path.is_file(), f"{path.parent} holds no {path.name}", hint, NOT_FOUND)
    try:
        return untrusted.parse_object(untrusted.read(path), path)
    except OSError as error:
        raise unreadable(path, error) from error


def read_folder(folder: Path, errors: list[QuantkitError] | None = None) -> dict[str, TensorInfo]:
    """Return all tensors of a checkpoint folder, single-file or sharded.

    Raises QuantkitError if there are no weights, only pickles, or if the index names a file that is absent,
    outside the folder, or without the tensor. errors: a list that collects errors of single shards instead;
    the tensors of all other shards are returned.
    """
    if (folder / INDEX).is_file():
        return _read_sharded(folder, errors)
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    pickles = [path.name for kind in ("*.bin", "*.pt*") for path in sorted(folder.glob(kind))]
    what = f"{folder} holds pickle weights only ({name_all(pickles, 3)}), which can run code when opened"
    hint = "convert once where you trust the source: AutoModelForCausalLM.from_pretrained(PATH)"
    require(not pickles, what, f"{hint}.save_pretrained(NEW) writes safetensors", UNSUPPORTED)
    hint = "give a Hugging Face checkpoint folder or hub id"
    raise QuantkitError(f"{folder} holds no {SINGLE} and no {INDEX}", hint, NOT_FOUND)


def _read_sharded(folder: Path, errors: list[QuantkitError] | None) -> dict[str, TensorInfo]:
    path = folder / INDEX
    weight_map = read_index(path)
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (folder / name).is_file()]
    problems = []
    if absent:
        what = f"{len(absent)} of {len(names)} shards named in {path} are absent: {name_all(absent)}"
        problems.append(QuantkitError(what, "download the missing files", NOT_FOUND))
    infos: dict[str, TensorInfo] = {}
    for name in names:
        try:
            held = {} if name in absent else read_header(folder / name)
            twice = name_all(sorted(infos.keys() & held.keys()))
            require(not twice, f"{folder / name} holds tensors of another shard: {twice}", MIXED)
            infos |= held
        except QuantkitError as error:
            absent.append(name)
            problems.append(error)
    lost = [
        key
        for key, name in weight_map.items()
        if name not in absent and (key not in infos or infos[key].file.name != name)
    ]
    if lost:
        what = f"{path} places tensors in shards that do not hold them: {name_all(lost)}"
        problems.append(QuantkitError(what, MIXED))
    if errors is not None:
        errors += problems
    elif problems:
        raise problems[0]
    return infos


def read_index(path: Path) -> dict[str, str]:
    """Return the shard of every tensor. Raises QuantkitError if the index is invalid or names a path outside
    the folder."""
    try:
        weight_map = dict(untrusted.parse(untrusted.read(path))["weight_map"])
        if any(len(name) > LONGEST_TENSOR for name in weight_map):
            raise ValueError(f"names of more than {LONGEST_TENSOR} characters")
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise TypeError("shard names must be strings")
        "".join(weight_map.values()).encode()  # no lone surrogates
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise QuantkitError(f"{path} is not a safetensors index ({error})", "download it again") from error
    outside = {
        name
        for name in weight_map.values()
        if Path(name).name != name or name in ("", ".", "..") or "\0" in name
        or len(name.encode()) > LONGEST_NAME
    }  # fmt: skip
    what = f"{path} names files that cannot lie in its folder: {name_all(sorted(outside), 3)}"
    hint = "do not trust this checkpoint; shards must be in the folder of their index"
    require(not outside, what, hint, UNSUPPORTED)
    return weight_map


def raw(info: TensorInfo) -> Iterator[bytes]:
    """Yield a stored tensor's bytes, piece by piece."""
    with open(info.file, "rb", buffering=0) as source:
        source.seek(info.offset)
        left = info.nbytes
        while left:
            chunk = source.read(min(COPY_BYTES, left))
            if not chunk:
                raise broken(info.file, f"{info.name} ends early")
            yield chunk
            left -= len(chunk)


Data = Callable[[TensorInfo], Iterable[bytes | memoryview]]


def write_file(path: Path, infos: Iterable[TensorInfo], data: Data = raw) -> None:
    """Write one safetensors file. data: returns a tensor's bytes; default: the stored bytes.

    Larger dtypes come first, so that every tensor is aligned without holes (the format allows none). The
    metadata has one key, because the order of several keys would change from run to run.
    """
    infos = sorted(infos, key=lambda info: (-DTYPE_BYTES.get(info.dtype, 1), natural(info.name)))
    header: dict = {"__metadata__": {"format": "pt"}}
    offset = 0
    for info in infos:
        span = [offset, offset + info.nbytes]
        header[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": span}
        offset += info.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for info in infos:
            out.writelines(data(info))


def write_folder(folder: Path, infos: Iterable[TensorInfo], shard_bytes: int, data: Data = raw) -> None:
    """Write `model.safetensors`, or shards `model-0000i-of-0000n.safetensors` and their index. Shards have at
    most `shard_bytes` and hold tensors in natural order of names; a larger tensor gets its own shard."""
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name = {info.name: info for info in sorted(infos, key=lambda info: natural(info.name))}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda info: info.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for name, group in split.filename_to_tensors.items():
        write_file(folder / name, [by_name[tensor] for tensor in group], data)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
