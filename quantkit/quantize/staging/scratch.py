"""Files that a job needs for a while, beside its staged blocks: each there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from quantkit.models.files import reading, safetensors_folder

LIST = "scratch.json"


class Scratch:
    """Named files of tensors in `folder`, and what says that all of a kind are there.

    A list of their hashes is written when they are complete: a file that was changed or lost since is found.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._list = folder / LIST

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Tensors of the host under a name."""
        path = self._path(name)
        save_file(tensors, path.with_suffix(".tmp"), metadata={"format": "pt"})
        os.replace(path.with_suffix(".tmp"), path)

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
        temporary = self._list.with_suffix(".tmp")
        temporary.write_text(json.dumps({name: self._sha256(name) for name in names}, indent=2))
        os.replace(temporary, self._list)

    def is_complete(self, names: Iterable[str]) -> bool:
        """Whether these are there as they were when that was said."""
        try:
            listed = json.loads(self._list.read_text())
            return all(listed.get(name) == self._sha256(name) for name in names)
        except (OSError, ValueError):
            return False

    def _sha256(self, name: str) -> str:
        with open(self._path(name), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
