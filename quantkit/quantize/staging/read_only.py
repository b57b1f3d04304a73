"""The staging of a rank that does not write: it reads what the first rank has staged, which takes a folder
that all of them see, and otherwise leaves the output alone.

What it makes itself, which is what the first rank makes, waits in a temporary folder of its own while the
block is at work: experts that come back into memory are read from there.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from quantkit.quantize.staging.blocks import StagedBlocks
from quantkit.quantize.staging.folder import Staging


class ReadOnlyStaging(Staging):
    """See `Staging`; of what would be written, nothing is."""

    def __init__(self, output: Path, one_file: bool = False):
        super().__init__(output, one_file)
        self._own: StagedBlocks | None = None

    def check(self, resume: bool, overwrite: bool) -> None:
        """The first rank does."""

    @contextmanager
    def opened(self, fingerprint: dict, resume: bool, lasting: bool = True) -> Iterator[None]:
        """A temporary folder."""
        folder = Path(tempfile.mkdtemp(prefix="quantkit-"))
        self._own = StagedBlocks(folder)
        try:
            yield
        finally:
            self._writer.shutdown()
            shutil.rmtree(folder, ignore_errors=True)

    def sign(self, fingerprint: dict) -> None:
        """The first rank does."""

    def forget(self, index: int) -> None:
        """Of this rank's own."""
        self.wait()
        self._own.forget(index)

    def write_part(self, index: int, number: int, tensors: dict[str, Tensor]) -> Path:
        """In the temporary folder."""
        self.wait()
        path = self._own.part_path(index, number)
        self._writing = self._writer.submit(self._own.save_part, path, tensors)
        return path

    def write_block(self, index: int, tensors: dict[str, Tensor], record: list[dict]) -> None:
        """The block is done, and its parts are needed no more."""
        self._writing = self._writer.submit(self._own.forget, index)

    def write_rest(self, tensors: dict[str, Tensor]) -> None:
        """The first rank does."""

    def discard(self) -> None:
        """It is the first rank's."""

    def assemble(self, fill: Callable[[Path], None]) -> Path:
        """The first rank does."""
        return self.place
