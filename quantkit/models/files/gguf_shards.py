"""Names of a GGUF file in shards. Clients open the first, which has the metadata, and find the others."""

import os
import re
from pathlib import Path

# llama.cpp's name of a shard of NAME.gguf, such as NAME-00001-of-00003.gguf
NAME = re.compile(r"\A(.+)-([0-9]{5})-of-(?!0000[01])([0-9]{5})\.gguf\Z", re.DOTALL)


def paths(output: Path, count: int) -> list[Path]:
    """Return the paths of `output` in `count` shards; a single one is `output` itself."""
    stem = output.name.removesuffix(".gguf")
    names = [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    return [output.with_name(name) for name in names] if count > 1 else [output]


def whole(path: Path) -> Path:
    """Return `NAME.gguf` for a shard of it; other paths unchanged."""
    return path.with_name(NAME.sub(r"\1.gguf", path.name)) if path.name else path


def base_name(source: str) -> str:
    """Return the name of a source on which names of outputs are based."""
    path = Path(source) if source not in (".", "..") else Path(source).resolve()
    return whole(path).name.removesuffix(".gguf") or "model"


def destination(output: Path | None, name: str) -> Path:
    """Return the path of an output whose default name is `name`. output: as typed; for a GGUF file, a path
    with another ending is a folder."""
    is_folder = output and name.endswith(".gguf") and (output.suffix != ".gguf" or output.is_dir())
    return output / name if is_folder else output or Path(name)


def of(path: Path) -> list[Path]:
    """Return the paths of all shards of the file to which a path, by its name, belongs."""
    match = NAME.fullmatch(path.name)
    return paths(whole(path), int(match[3]) if match else 1)


def existing(output: Path) -> list[Path]:
    """Return the files that count as the output `NAME.gguf`: itself, and any number of shards."""
    files = [output] if os.path.lexists(output) else []
    if output.suffix == ".gguf" and output.parent.is_dir():
        files += sorted(path for path in output.parent.iterdir() if output == whole(path) != path)
    return files


def first(path: Path) -> Path:
    """Return the first shard for `NAME.gguf` and for any shard; other paths unchanged."""
    files = [path] if whole(path) == path else of(path)[:1]
    if not os.path.lexists(files[0]):
        files = [file for file in existing(path) if file == of(file)[0]]
    return files[0] if len(files) == 1 else path
