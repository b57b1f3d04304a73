"""Blocks on the disk: the files of each, and a record with the sha256 of all of them.

`block-00000.safetensors` holds a block's tensors, but for those that did not wait in memory, which lie in
`part-00000-0000.safetensors` and so on; `block-00000.json` says what was found of its linears, and what the
files' bytes were. The last of these to appear is the first: a block is whole or is not there.

Files that a job needs for a while lie beside them (`Scratch`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from quantkit.models.files import reading, safetensors_folder, untrusted
from quantkit.models.files.safetensors_folder import TensorInfo

RECORD_BYTES = 1 << 30  # of a block of any number of experts


class StagedBlocks:
    """Those in a folder. What is written is on the disk, under its name, when the call returns; unless
    `lasting` is unset, for blocks made again as fast as they are written: what a lost power supply takes of
    those is known by their sums."""

    lasting = True

    def __init__(self, folder: Path):
        self.folder = folder
        self._sums: dict[Path, str] = {}  # of the parts of a block that is being made
        self._whole: set[int] = set()  # blocks known to be as they were written

    def path(self, index: int) -> Path:
        """Of the file that says that a block is there."""
        return self.folder / f"block-{index:05d}.safetensors"

    def part_path(self, index: int, number: int) -> Path:
        """Of some of its tensors."""
        return self.folder / f"part-{index:05d}-{number:04d}.safetensors"

    def _parts(self, index: int) -> list[Path]:
        return sorted(self.folder.glob(f"part-{index:05d}-*.safetensors"))

    def there(self) -> list[int]:
        """Which have a file."""
        return [
            int(path.stem.removeprefix("block-")) for path in sorted(self.folder.glob("block-*.safetensors"))
        ]

    def is_done(self, index: int) -> bool:
        """Whether a block is there, byte for byte as it was written."""
        path = self.path(index)
        if path.is_file() and index not in self._whole:
            files = _files(_record(path))
            paths = {self.folder / name: told for name, told in files.items()}
            if files and all(file.is_file() and _sha256(file) == told for file, told in paths.items()):
                self._whole.add(index)
        return index in self._whole

    def records(self) -> list[dict]:
        """What was recorded about the linears of all blocks."""
        return [row for index in self.there() for row in (_record(self.path(index)) or {})["linears"]]

    def infos(self, index: int) -> dict[str, TensorInfo]:
        """Places of a block's tensors, by stored name."""
        headers = map(safetensors_folder.read_header, [*self._parts(index), self.path(index)])
        return {name: info for header in headers for name, info in header.items()}

    def forget(self, index: int) -> None:
        """Remove a block, or what an attempt at it that failed has left."""
        self._whole.discard(index)
        for path in (self.path(index), *self._parts(index)):
            path.unlink(missing_ok=True)

    def save_part(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Some of the tensors of a block."""
        temporary = _saved(path, tensors, self.lasting)
        self._sums[path] = _sha256(temporary)
        _rename(temporary, path, self.lasting)

    def save(self, index: int, tensors: dict[str, Tensor], record: list[dict]) -> None:
        """The others, and a block is there."""
        path = self.path(index)
        temporary = _saved(path, tensors, self.lasting)
        files = {part.name: self._sums.pop(part) for part in self._parts(index)}
        files[path.name] = _sha256(temporary)
        write_text(path.with_suffix(".json"), json.dumps({"files": files, "linears": record}), self.lasting)
        _rename(temporary, path, self.lasting)
        self._whole.add(index)


def save(path: Path, tensors: dict[str, Tensor], lasting: bool = True) -> None:
    """A file of tensors, whole or not at all."""
    _rename(_saved(path, tensors, lasting), path, lasting)


def write_text(path: Path, text: str, lasting: bool = True) -> None:
    """The same for a text."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text)
    if lasting:
        sync(temporary)
    os.replace(temporary, path)


def sync(path: Path) -> None:
    """Until the disk has a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _saved(path: Path, tensors: dict[str, Tensor], lasting: bool = True) -> Path:
    """A file of tensors that is to be renamed to `path`, on the disk."""
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"format": "pt"})
    if lasting:
        sync(temporary)
    return temporary


def _rename(temporary: Path, path: Path, lasting: bool = True) -> None:
    os.replace(temporary, path)
    if lasting:
        sync(path.parent)


def _record(path: Path) -> dict | None:
    """What was recorded of a block whose tensors are at `path`; None where nothing is that says so."""
    try:
        found = untrusted.parse(untrusted.read(path.with_suffix(".json"), RECORD_BYTES))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("linears"), list) else None


def _files(record: dict | None) -> dict[str, str]:
    """The sha256 of every file of a block; {} where none is recorded, or a file of another folder."""
    files = (record or {}).get("files")
    named = isinstance(files, dict) and all(Path(name).name == name for name in files)
    return files if named else {}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


LIST = "scratch.json"


class Scratch:
    """Named files of tensors in `folder`, and what says that all of a kind are there.

    A list of their hashes is written when they are complete: a file that was changed or lost since is found.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._list = folder / LIST

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Tensors of the host under a name."""
        save(self._path(name), tensors, lasting=False)

    def read(self, name: str) -> dict[str, Tensor]:
        """All tensors of a file."""
        return {
            key: reading.tensor(info)
            for key, info in safetensors_folder.read_header(self._path(name)).items()
        }

    def remove(self, name: str) -> None:
        """It is needed no more."""
        self._path(name).unlink(missing_ok=True)

    def complete(self, names: Iterable[str]) -> None:
        """Say that these are all."""
        sums = {name: _sha256(self._path(name)) for name in names}
        write_text(self._list, json.dumps(sums, indent=2), lasting=False)

    def is_complete(self, names: Iterable[str]) -> bool:
        """Whether these are there as they were when that was said."""
        try:
            listed = json.loads(self._list.read_text())
            return all(listed.get(name) == _sha256(self._path(name)) for name in names)
        except (OSError, ValueError):
            return False
