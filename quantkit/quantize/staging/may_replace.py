"""Check that a job replaces only files written by quantkit or another writer of checkpoints.

All checks are of the path itself, not of a link's target. Only plain files and folders are replaced, never a
device, pipe, link or mount point; a folder only if every file in it belongs to a checkpoint.
"""

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from quantkit.errors import USAGE, QuantkitError, full_disk, name_all, require
from quantkit.models.files import gguf_shards, headers, untrusted
from quantkit.models.files.headers import COMPANIONS, MANIFEST

WRITTEN = (  # by writers of checkpoints
    *COMPANIONS,
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    "quantize_config.json",
    "*processor_config.json",
    "configuration_*.py",
    "modeling_*.py",
    "tokenization_*.py",
    "hf_quant_config.json",
    "README.md",
    ".gitattributes",
    MANIFEST,
    "quantkit-*.json",
)
WEIGHTS = "*.safetensors", "pytorch_model*.bin"
STAGED = (  # by jobs, searches and safetensors (.tmp), in their staging folder
    *(".tmp*", ".*.tmp", "lock", "fingerprint.json*", "block-*", "part-*", "rest.*"),
    *("output*", "replaced", "curvature", "best.*"),
    *("sensitivities.json", "usual", "searched", "uniform", "gguf", "recipe.yaml"),
)
MAGIC = b"GGUF"
LONGEST_ENDING = ".partial.tmp"  # that is added to a name
ELSEWHERE = "choose another -o"
ORIGINAL = "holds an unquantized model that quantkit did not write"
FLOATS = {"F32", "F16", "BF16"}


def check_place(output: Path) -> None:
    """Raise QuantkitError unless a file can be created at this path; tries with an unnamed file."""
    try:
        output.name.encode()
        above = next(path for path in output.absolute().parents if path.exists())
        possible = output.name not in ("", "..") and above.is_dir()
        require(possible, f"{output} cannot be a new file or folder", ELSEWHERE, USAGE)
        with suppress(FileNotFoundError):  # but not for a name that is too long
            (above / f"{output.name}{LONGEST_ENDING}").lstat()
        with tempfile.TemporaryFile(dir=above):
            pass
    except UnicodeEncodeError as error:
        raise QuantkitError(f"{output} is not a UTF-8 name", ELSEWHERE, USAGE) from error
    except OSError as error:
        if full_disk(error) and error.errno != errno.EROFS:
            return  # how much is needed and free is said elsewhere
        raise QuantkitError(f"{output} cannot be written: {error.strerror}", ELSEWHERE, USAGE) from error


def check(output: Path, one_file: bool, overwrite: bool) -> None:
    """Raise QuantkitError unless a job may write to `output`. one_file: a GGUF file, else a folder.

    overwrite: the user allowed to replace an existing output, all shards of it.
    """
    for path in gguf_shards.existing(output):
        mode = path.lstat().st_mode
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)) or os.path.ismount(path):
            raise QuantkitError(f"{path} is not a plain file or folder", ELSEWHERE, USAGE)
        if not overwrite:
            check_new([output])
        if stat.S_ISDIR(mode) == one_file:
            wanted, existing = ("a file", "a folder") if one_file else ("a folder", "a file")
            raise QuantkitError(f"{path} is {existing}, the job writes {wanted}", ELSEWHERE, USAGE)
        if one_file:
            with open(path, "rb") as file:
                start = file.read(len(MAGIC))
            lost = None if start in (MAGIC, b"") else "is not a GGUF file"
            if start == MAGIC and _is_original(path):
                lost = ORIGINAL
        else:
            lost = _lost(path)
        hint = f"move it away, or {ELSEWHERE}; --overwrite replaces quantized models only"
        require(not lost, f"{path} {lost}: it would be lost", hint, USAGE)


def check_new(outputs: Sequence[Path]) -> None:
    """Raise QuantkitError naming the outputs that already exist."""
    if existing := [str(path) for output in outputs for path in gguf_shards.existing(output)]:
        verb, them = ("exists", "it") if len(existing) == 1 else ("exist", "them")
        hint = f"{ELSEWHERE}, or replace {them} with --overwrite"
        if len(outputs) > 1:
            hint += "; --resume makes only those that are left"
        raise QuantkitError(f"{name_all(existing, len(existing))} {verb}", hint, USAGE)


def identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a path; None if it does not exist. A rename keeps both."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_source(output: Path, source: Path, what: str = "source") -> None:
    """Raise QuantkitError if the output is, or contains, a file that the job reads. what: its name."""
    places = source.resolve(), *source.resolve().parents
    if any(path.resolve() in places for path in (output, *gguf_shards.existing(output))):
        raise QuantkitError(f"{output} holds the {what}", ELSEWHERE, USAGE)


def _lost(output: Path) -> str | None:
    """Return why a folder must not be replaced; None for a quantized checkpoint or a job's output."""
    with os.scandir(output) as entries:
        plain = {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
    written = {name for name in plain if plain[name] and any(fnmatch(name, p) for p in WRITTEN)}
    templates = output / untrusted.TEMPLATES
    if templates.is_dir() and not templates.is_symlink():
        ours = all(path.suffix == ".jinja" and path.is_file() for path in templates.iterdir())
        written |= {templates.name} if ours else set()
    if foreign := sorted(plain.keys() - written):
        return f"contains other files, {name_all(foreign)}"
    holds_weights = any(fnmatch(name, pattern) for name in written for pattern in WEIGHTS)
    if holds_weights and MANIFEST not in written and not _is_quantized(output):
        return ORIGINAL
    return None


def _is_original(file: Path) -> bool:
    """Return whether a GGUF file holds an unquantized model that quantkit did not write."""
    try:
        contents = headers.at(str(file), file)
    except QuantkitError:
        return False
    return contents.manifest is None and {info.dtype for info in contents.infos.values()} <= FLOATS


def _is_quantized(folder: Path) -> bool:
    """Return whether a checkpoint's configuration names a quantization."""
    if (folder / "quantize_config.json").is_file():
        return True
    try:
        config = untrusted.parse(untrusted.read(folder / "config.json"))
    except (OSError, ValueError, QuantkitError):
        return False
    return isinstance(config, dict) and bool(config.get("quantization_config"))


def check_staged(folder: Path, is_ours: Callable[[], bool]) -> None:
    """Raise QuantkitError if the staging folder exists but belongs to no job.

    is_ours: returns whether it has a fingerprint; without one, it may hold only a lock.
    """
    try:
        mode = folder.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISDIR(mode):
        names = {path.name for path in folder.iterdir()}
        foreign = sorted(name for name in names if not any(fnmatch(name, pattern) for pattern in STAGED))
        if names <= {"lock", "fingerprint.json.tmp"} or (is_ours() and not foreign):
            return
        what = f"{folder} holds files that no job writes, which would be lost: {name_all(foreign)}"
        require(not (foreign and is_ours()), what, f"move them away, or {ELSEWHERE}", USAGE)
    what = f"{folder} is not an unfinished job, but the job needs this folder"
    raise QuantkitError(what, f"move it away, or {ELSEWHERE}", USAGE)
