"""Staged blocks: the files of each block, and a record with their sha256.

`block-00000.safetensors` holds a block's last tensors and is written last, so a block is staged completely or
not at all. Earlier tensors of the block are in `part-00000-0000.safetensors` and so on. `block-00000.json`
records its linears and the files' sha256.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from quantkit.models.files import checksums, reading, safetensors_folder, untrusted
from quantkit.models.files.safetensors_folder import TensorInfo

RECORD_BYTES = 1 << 30  # limit for the record of a block with many experts


class StagedBlocks:
    """Staged blocks in a folder. A file is synced and renamed before a call returns. lasting: False skips the
    sync, for blocks that are quick to make again; sha256 sums reveal a loss after a power failure."""

    lasting = True

    def __init__(self, folder: Path):
        self.folder = folder
        self._sums: dict[Path, str] = {}  # sha256 of the parts of a block in progress
        self._whole: set[int] = set()  # blocks whose files match their sha256

    def path(self, index: int) -> Path:
        """Return the path of a block's main file, which is written last."""
        return self.folder / f"block-{index:05d}.safetensors"

    def part_path(self, index: int, number: int) -> Path:
        """Return the path of one part of a block."""
        return self.folder / f"part-{index:05d}-{number:04d}.safetensors"

    def _parts(self, index: int) -> list[Path]:
        return sorted(self.folder.glob(f"part-{index:05d}-*.safetensors"))

    def there(self) -> list[int]:
        """Return the numbers of the blocks that have a main file."""
        paths = sorted(self.folder.glob("block-*.safetensors"))
        return [int(path.stem.removeprefix("block-")) for path in paths]

    def is_done(self, index: int) -> bool:
        """Return whether a block is staged and all its files match their sha256."""
        path = self.path(index)
        if path.is_file() and index not in self._whole:
            files = {self.folder / name: sha256 for name, sha256 in _record(path)["files"].items()}
            exist = files and all(map(Path.is_file, files))
            if exist and [checksums.of_file(file) for file in files] == [*files.values()]:
                self._whole.add(index)
        return index in self._whole

    def records(self) -> list[dict]:
        """Return the records of the linears of all blocks."""
        return [linear for index in self.there() for linear in _record(self.path(index))["linears"]]

    def infos(self, index: int) -> dict[str, TensorInfo]:
        """Return file and offset of a block's tensors, by stored name."""
        headers = map(safetensors_folder.read_header, [*self._parts(index), self.path(index)])
        return {name: info for header in headers for name, info in header.items()}

    def read(self, index: int) -> dict[str, Tensor]:
        """Return a block's tensors, by stored name."""
        return {name: reading.tensor(info) for name, info in self.infos(index).items()}

    def forget(self, index: int) -> None:
        """Remove a block's files, complete or not."""
        self._whole.discard(index)
        for path in (self.path(index), *self._parts(index)):
            path.unlink(missing_ok=True)

    def save_part(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Write a part of a block."""
        with replacing(path, self.lasting) as file:
            save_file(tensors, file, metadata={"format": "pt"})
            self._sums[path] = checksums.of_file(file)

    def save(self, index: int, tensors: dict[str, Tensor], record: list[dict]) -> None:
        """Write the remaining tensors and the record; the block is then staged."""
        path = self.path(index)
        with replacing(path, self.lasting) as file:
            save_file(tensors, file, metadata={"format": "pt"})
            files = {part.name: self._sums.pop(part) for part in self._parts(index)}
            files[path.name] = checksums.of_file(file)
            with replacing(path.with_suffix(".json"), self.lasting) as stored:
                stored.write_text(json.dumps({"files": files, "linears": record}))
        self._whole.add(index)


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of tensors, completely or not at all."""
    with replacing(path) as file:
        save_file(tensors, file, metadata={"format": "pt"})


@contextmanager
def replacing(path: Path, lasting: bool = True) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path`. lasting: sync file and folder."""
    temporary = path.with_suffix(f"{path.suffix}.tmp")
    yield temporary
    if lasting:
        sync(temporary)
    os.replace(temporary, path)
    if lasting:
        sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _record(path: Path) -> dict:
    """Return the record of the block at `path`, without files if it is absent, damaged or names folders."""
    try:
        record = untrusted.parse(untrusted.read(path.with_suffix(".json"), RECORD_BYTES))
        named = isinstance(record["files"], dict) and all(Path(name).name == name for name in record["files"])
        whole = named and isinstance(record["linears"], list)
    except (OSError, ValueError, LookupError, TypeError):
        whole = False
    return record if whole else {"files": {}}
