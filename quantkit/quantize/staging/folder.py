"""The staging folder: finished blocks of a running job, and the output while it is assembled.

`OUT.partial/`, of a search `OUT.auto/`, lies next to the output, so that publishing is a rename. If the job
is killed, the folder holds only complete blocks (`blocks.py`) and files that will be made again. Blocks that
were staged before the source was hashed are also made again, because they may belong to another source.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from quantkit.errors import RESOURCES, USAGE, DamagedError, QuantkitError, full_disk, name_all, require
from quantkit.models.files import checksums, gguf_shards, safetensors_folder, untrusted
from quantkit.models.files.safetensors_folder import TensorInfo
from quantkit.options import MOST_THREADS
from quantkit.quantize.staging import may_replace
from quantkit.quantize.staging.blocks import StagedBlocks, replacing, save, sync
from quantkit.quantize.staging.fingerprint import differences

REST = "rest.safetensors"
GRADIENTS = "curvature"  # folder of calibrate/curvature.py
SENSITIVITIES = "sensitivities.json"  # the table of `quantkit auto`
MOST = {"batch_size": 1 << 20, "threads": MOST_THREADS}


class Staging(StagedBlocks):
    """Staged blocks of the job that writes `output`, identified by its fingerprint.

    one_file: the output is a GGUF file, not a folder. follows: another rank writes, and this rank reads its
    staged blocks from a shared folder. This rank keeps its own, equal, parts of a block in a temporary folder
    until the block is done, because experts that return into memory are read from there. ending: of the
    folder's name. anew: words of hints on how to start again.
    """

    def __init__(self, output: Path, one_file: bool = False, follows: bool = False, ending: str = "partial"):
        super().__init__(output.parent / f"{output.name}.{ending}")
        self.output, self.one_file, self.follows = output, one_file, follows
        self.anew = "start again with --overwrite"
        self._own: StagedBlocks = self
        self._lock = None
        self._replaces = False
        self._signed: dict = {}
        self._writer = ThreadPoolExecutor(1, "staging")  # waits for the disk while the next block is made
        self._writing: deque[Future[None]] = deque()  # at most two, see `_start`
        self.sums: Future[dict[str, str]] | None = None  # see `sum_up`
        self._made: tuple[int, int] | None = None  # identity of the output that is renamed into place

    def stored_fingerprint(self) -> dict | None:
        """Return the fingerprint of the staged job; None if it is absent or has no sha256 of the source."""
        stored = self._fingerprint()
        what = f"{self.folder / 'fingerprint.json'} is damaged: its execution is invalid"
        hint = "start again with --overwrite"
        require(not stored or _runs(stored.get("execution")), what, hint, USAGE)
        return stored if stored and stored["source_sha256"] else None

    def _fingerprint(self) -> dict | None:
        """Return the stored fingerprint, even without the source's sha256; None if there is none."""
        path = self.folder / "fingerprint.json"
        try:
            stored = untrusted.parse(untrusted.read(path)) if path.is_file() else None
        except (OSError, ValueError):
            return None
        if not isinstance(stored, dict) or "quantkit" not in stored or "source_sha256" not in stored:
            return None
        sha256 = stored["source_sha256"]
        return stored if sha256 is None or re.fullmatch("[0-9a-f]{64}", str(sha256)) else None

    def check(self, resume: bool, overwrite: bool) -> None:
        """Raise QuantkitError if the output cannot be made, or would replace something without permission."""
        if self.follows:
            return
        self._replaces = overwrite
        may_replace.check_place(self.output)
        may_replace.check(self.output, self.one_file, overwrite)
        may_replace.check_staged(self.folder, lambda: self._fingerprint() is not None)
        may_replace.check_place(self.folder / "lock")
        if (self.folder / "lock").exists():
            with open(self.folder / "lock", "r+") as file:
                self._lock_file(file)
        what = f"{self.folder} holds an unfinished job"
        hint = f"continue it with --resume, or {self.anew}"
        require(resume or overwrite or not self.has_work, what, hint, USAGE)

    @contextmanager
    def opened(self, fingerprint: dict, resume: bool, lasting: bool = True) -> Iterator[None]:
        """Lock the folder for this job. Raises QuantkitError if it holds another job or is in use.

        fingerprint: source_sha256 may be None until `sign` gets the complete one. lasting: see
        `StagedBlocks`.
        """
        if self.follows:
            with tempfile.TemporaryDirectory(prefix="quantkit-", ignore_cleanup_errors=True) as own:
                self._own = StagedBlocks(Path(own))
                with self._writer:
                    yield
            return
        self.lasting = lasting
        stored = self.stored_fingerprint() if resume else None
        different = differences(stored, fingerprint) if stored else []
        what = f"{self.folder} holds another job; different: {name_all(different)}"
        hint = f"repeat the options of the first run, or {self.anew}"
        require(not different, what, hint, USAGE)
        self._acquire()
        try:
            if self._restore():  # the check before this one saw no output
                may_replace.check(self.output, self.one_file, self._replaces)
            if not stored:
                _clear(self.folder)  # files of another job
            self.sign(fingerprint)
            yield
        except QuantkitError as error:
            self._writer.shutdown()
            if isinstance(error, DamagedError) or not self.has_work:
                self.discard()  # nothing in it is worth keeping
            raise
        finally:
            self._writer.shutdown()
            self._lock.close()

    def sign(self, fingerprint: dict) -> None:
        """Write the job's fingerprint."""
        if fingerprint != self._signed and not self.follows:
            with replacing(self.folder / "fingerprint.json") as file:
                file.write_text(json.dumps(fingerprint, indent=2))
            self._signed = fingerprint

    @property
    def has_work(self) -> bool:
        """Whether the folder holds finished work, so that a job can continue."""
        measured = any((self.folder / GRADIENTS).glob("block-*")) or (self.folder / SENSITIVITIES).exists()
        return bool(measured or self.there() or self.rest())

    def _acquire(self) -> None:
        """Make the folder and take its lock, which is released when the process ends, if not before."""
        taken, path = None, self.folder / "lock"
        while taken is None or taken != may_replace.identity(path):  # the last job may just remove the folder
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(path, "w")
            self._lock_file(self._lock)
            status = os.fstat(self._lock.fileno())
            taken = status.st_dev, status.st_ino

    def _lock_file(self, file: IO) -> None:
        """Lock an open file until it is closed. Raises QuantkitError if another process has the lock."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            what = f"{self.folder} is in use by another process"
            raise QuantkitError(what, "wait until it is done") from error

    def _restore(self) -> bool:
        """Move a replaced output back if its job ended before the new one was in place; return whether."""
        placed = os.path.lexists(gguf_shards.first(self.output))
        moved = [] if placed else sorted((self.folder / "replaced").glob("*"), reverse=True)
        for path in moved:  # the first shard last, as in `publish`
            os.replace(path, self.output.with_name(path.name))
        return bool(moved)

    def done(self, count: int, warn: Callable[[str], None]) -> list[bool]:
        """Return which of `count` blocks are staged. Warns of damaged blocks and removes them."""
        done = [self.is_done(index) for index in range(count)]
        damaged = [index for index in self.there() if index < count and not done[index]]
        if damaged:
            numbers = name_all(str(index + 1) for index in damaged)
            warn(f"damaged staged blocks are quantized again: {numbers}")
            for index in damaged:
                self.forget(index)
        return done

    def tensors(self) -> dict[str, TensorInfo]:
        """Return file and offset of all staged blocks' tensors, by stored name."""
        return {name: info for index in self.there() for name, info in self.infos(index).items()}

    def start(self, index: int) -> None:
        """Remove files that a failed attempt at block `index` has left."""
        if self.follows:
            self.wait()
        self._own.forget(index)

    def write_part(self, index: int, number: int, tensors: dict[str, Tensor]) -> Path:
        """Start to stage some of a block's tensors, after the previous write ends. Returns their path."""
        self.wait()
        path = self._own.part_path(index, number)
        self._start(self._own.save_part, path, tensors)
        return path

    def write_block(self, index: int, tensors: dict[str, Tensor], record: list[dict]) -> None:
        """Start to stage a block's remaining tensors and record after its last part. `wait` raises errors."""
        if self.follows:
            self._start(self._own.forget, index)
        else:
            self._start(self.save, index, tensors, record)

    def _start(self, write: Callable[..., None], *arguments: Any) -> None:
        """Queue a write behind the last one, once all others have ended. It is left out if that one fails."""
        self.wait(but=1)
        last = self._writing[-1] if self._writing else None

        def after_last() -> None:
            if last:
                last.result()
            write(*arguments)

        self._writing.append(self._writer.submit(after_last))

    def wait(self, but: int = 0) -> None:
        """Wait until all writes but the last `but` have ended; raise the first error, if any."""
        while len(self._writing) > but:
            self._writing.popleft().result()

    def write_rest(self, tensors: dict[str, Tensor]) -> None:
        """Stage tensors outside the blocks."""
        if not self.follows:
            save(self.folder / REST, tensors)

    def rest(self) -> dict[str, TensorInfo]:
        """Return file and offset of staged tensors outside the blocks, by the names given to `write_rest`."""
        path = self.folder / REST
        return safetensors_folder.read_header(path) if path.is_file() else {}

    def discard(self) -> None:
        """Remove the staging folder, if it exists."""
        if self.folder.exists() and not self.follows:
            self._restore()
            _clear(self.folder)
            shutil.rmtree(self.folder)

    def finished(self) -> bool:
        """Return whether the output is published; if so, remove the rest of the staging folder."""
        published = self._made and may_replace.identity(gguf_shards.first(self.output)) == self._made
        if published:
            self.discard()
        return published

    @property
    def assembled(self) -> Path:
        """Path of the output until it is published."""
        return self.folder / f"output{self.output.suffix}"

    @contextmanager
    def assemble(self) -> Iterator[Path]:
        """Yield the path at which to write the output anew, a folder, file or shards; sync it afterwards."""
        for path in gguf_shards.existing(self.assembled):
            _remove(path)
        yield self.assembled
        self._start(_sync_all, self.assembled)

    def sum_up(self) -> None:
        """Start to compute `sums`, the sha256 of the assembled folder's files."""
        self.sums = self._writer.submit(checksums.of_folder, self.assembled)

    def publish(self, made: Path | None = None) -> None:
        """Sync the output at `made`, by default `assembled`, rename it to its final path, and remove the
        staging folder.

        Raises QuantkitError if another output appeared at the final path.
        """
        self.wait()
        made = made or self.assembled
        _sync_all(made)
        existing = gguf_shards.existing(self.output)
        if existing and not self._replaces:
            hint = "move it away and run the same command again, with --resume if the command has it"
            raise QuantkitError(f"{existing[0]} appeared while the job ran", hint)
        may_replace.check(self.output, self.one_file, self._replaces)
        self._made = may_replace.identity(gguf_shards.first(made))
        replaced = self.folder / "replaced"
        _remove(replaced)
        replaced.mkdir()
        for path in existing:
            os.rename(path, replaced / path.name)
        stem, final = (path.name.removesuffix(".gguf") for path in (made, self.output))
        for path in reversed(gguf_shards.existing(made)):  # the first shard last: clients open it
            os.rename(path, self.output.with_name(final + path.name.removeprefix(stem)))
        sync(self.output.parent)
        self.discard()


def _runs(execution: Any) -> bool:
    """Return whether a fingerprint's execution is valid, so that a resumed job can use it."""
    if not isinstance(execution, dict):
        return False
    counts = [(execution[name], most) for name, most in MOST.items() if name in execution]
    words = [execution[name] for name in ("dtype", "device", "sequential", "states") if name in execution]
    fits = all(type(number) is int and 0 < number <= most for number, most in counts)
    return fits and all(isinstance(word, str) for word in words)


def _clear(folder: Path) -> None:
    """Remove all but the lock. The fingerprint goes last, so that the folder names its job until then."""
    for path in folder.iterdir():
        if path.name not in ("fingerprint.json", "lock"):
            _remove(path)
    _remove(folder / "fingerprint.json")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_all(output: Path) -> None:
    for path in (*output.rglob("*"), *gguf_shards.existing(output)):
        sync(path)


@contextmanager
def disk_errors(
    folder: Path, then: str = "run the same command with --resume; finished blocks are kept there"
) -> Iterator[None]:
    """Turn a full disk or denied permission in `folder` into QuantkitError; staged blocks stay. then: what to
    do after freeing space, for the hint."""
    try:
        yield
    except Exception as error:
        denied = isinstance(error, PermissionError) or f"(os error {errno.EACCES})" in str(error)
        if denied and (getattr(error, "filename", None) is None or folder.name in str(error)):
            message = f"{folder} cannot be written any more: permission denied"
            raise QuantkitError(message, f"allow it; then {then}") from error
        if (full := full_disk(error)) is None:
            raise
        message = f"the disk of {folder} {full[0]}"
        raise QuantkitError(message, f"{full[1]}; then {then}", RESOURCES) from error
