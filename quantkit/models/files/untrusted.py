"""Checks of untrusted input: files, JSON, configurations and tokenizers. Later code relies on these checks.

Nothing here imports torch. `safetensors_folder` and `gguf_file` check the headers of weights.
"""

import codecs
import json
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import UNSUPPORTED, QuantkitError, name_all, require
from quantkit.models.files import gguf_shards
from quantkit.models.machine.expert_share import EXPERTS, ROUTED

AGAIN = "download it again"
SMALL_BYTES = 1 << 26  # limit of files that are parsed whole
LARGE_BYTES = 1 << 28  # limit of files that transformers reads: eight times the largest tokenizer.json
SIZELESS_BYTES = 1 << 16  # limit of files that report size 0, such as those under /proc
VALUES = 8_000_000  # limit of values in a JSON text: each becomes an object of up to a hundred bytes
DEEP = 64  # limit of nested lists and objects
POINTER = b"version https://git-lfs"
FETCHED = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")
TEMPLATES = "additional_chat_templates"  # the only subfolder of a model's folder that is read
NAMED_TEMPLATES = f"{TEMPLATES}/*.jinja"

# ---- folders and files


def entries(path: Path) -> Iterator[Path]:
    """Yield the paths in a model's folder and those of its named chat templates, or a GGUF file's shards."""
    if path.is_dir():
        yield from path.iterdir()
        yield from path.glob(NAMED_TEMPLATES)
    else:
        yield from gguf_shards.of(path)


def refuse_folder(folder: Path) -> None:
    """Raise QuantkitError if a link in a model's folder leads outside, or a companion file of the weights is
    no plain file or too large.

    Files outside would be copied into the output. Links of the hub's cache to its blobs are allowed.
    """
    inside = folder.resolve()
    caches = [above.parent for above in inside.parents if above.name == "snapshots"]
    allowed = [inside, *((cache / "blobs").resolve() for cache in caches)]
    leading_out = sorted(
        str(path.relative_to(folder))
        for path in entries(folder)
        if path.is_symlink() and not any(map(path.resolve().is_relative_to, allowed))
    )
    what = f"{folder} holds links that lead out of it: {name_all(leading_out)}"
    hint = "replace the links by the files themselves if you trust them"
    require(not leading_out, what, hint, UNSUPPORTED)
    for path in sorted({path for pattern in (*FETCHED, NAMED_TEMPLATES) for path in folder.glob(pattern)}):
        if not path.exists():
            continue  # a link to nowhere: its reader says so
        refuse_irregular(path)
        fits = not path.is_file() or path.stat().st_size <= LARGE_BYTES
        require(fits, f"{path} is larger than {LARGE_BYTES >> 20} MiB: not read", AGAIN, UNSUPPORTED)


def refuse_pointer(path: Path) -> None:
    """Raise QuantkitError for a Git LFS pointer: a few lines of text in place of a large file. It is the most
    common broken download (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""
    with open(path, "rb") as file:
        _refuse_pointer(path, file.read(len(POINTER)))


def _refuse_pointer(name: object, data: bytes) -> None:
    what = f"{name} is a Git LFS pointer, not the file it stands for"
    hint = "fetch the file itself: git lfs pull in its folder, or hf download OWNER/NAME"
    require(not data.startswith(POINTER), what, hint)


def refuse_irregular(path: Path) -> None:
    """Raise QuantkitError for a pipe, device or socket, which may never end; OSError if it is absent."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise QuantkitError(f"{path} is not a plain file", "copy its contents into a plain file", UNSUPPORTED)


def read(path: Path, limit: int = SMALL_BYTES) -> bytes:
    """Return the bytes of a file. Raises QuantkitError if it is not a plain file or too large, OSError if it
    cannot be read."""
    refuse_irregular(path)
    size = max(path.stat().st_size, SIZELESS_BYTES)
    with open(path, "rb") as file:
        data = file.read(min(limit, size) + 1)
    what = f"{path} is larger than {limit / 2**20:g} MiB: not read"
    require(len(data) <= min(limit, size), what, AGAIN, UNSUPPORTED)
    return data


def parse(data: bytes, values: int = VALUES) -> Any:
    """Parse a JSON text. Raises ValueError if it is malformed, too deep, or may hold too many values.

    values: the limit; a parsed value takes far more memory than its text.
    """
    if sum(data.count(mark) for mark in (b"[", b"{", b",")) > values:
        raise ValueError(f"more than {values:,} values")
    if data.startswith(codecs.BOM_UTF8):
        raise ValueError("it begins with a byte order mark: save it as UTF-8 without one")
    try:
        tree = json.loads(data.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    _check_depth(tree)
    return tree


def parse_object(data: bytes, name: object) -> dict[str, Any]:
    """Parse a JSON object. Raises QuantkitError for any other text. name: of its file."""
    _refuse_pointer(name, data)
    try:
        content = parse(data)
    except ValueError as error:
        raise QuantkitError(f"{name} is not JSON: {error}", AGAIN) from error
    require(isinstance(content, dict), f"{name} is not a JSON object", AGAIN)
    return content


def _check_depth(tree: Any) -> None:
    """Raise ValueError if lists and objects are nested more deeply than recursive code can handle."""
    level = [tree]
    for _ in range(DEEP):
        nodes = (node for node in level if isinstance(node, (dict, list)))
        children = (node.values() if isinstance(node, dict) else node for node in nodes)
        level = [value for values in children for value in values]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def check_schema(tree: Any, schema: dict[str, Any], name: str, hint: str) -> None:
    """Raise QuantkitError (exit code 4) if parsed JSON does not match a JSON schema.

    The message names `name`, the path inside the document and the first rule that is broken.
    """
    import jsonschema

    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(tree))
    if error is not None:
        raise QuantkitError(f"{name}: {error.json_path}: {error.message}", hint, UNSUPPORTED)


# ---- configurations

LAYERS = {
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_encoder_layers",
    "decoder_layers", "encoder_layers", "depth",
}  # fmt: skip
FEW_LAYERS = 512  # layers that are built even with fewer stored tensors; each takes up to a second
COUNTED = dict.fromkeys(("num_labels", *EXPERTS), 1 << 16)
SIZES = 1 << 40  # limit of all other numbers
MOST_NESTED = 8  # limit of nested configurations


def refuse_config(config: Mapping[str, Any], tensors: int = 0) -> None:
    """Raise QuantkitError naming impossible numbers. tensors: how many are stored, a limit for layers."""
    limits = COUNTED | dict.fromkeys(LAYERS, max(tensors, FEW_LAYERS))
    wrong = [f"{name} {value:,}" for name, value in _numbers(config) if value > limits.get(name, SIZES)]
    wrong += [f"{name} {value:,}" for name, value in _numbers(config) if name in LAYERS and value < 0]
    wrong += _routed(config)
    stored = f", and {tensors:,} tensors are stored" if tensors else ""
    require(not wrong, f"config.json says {name_all(wrong, 3)}{stored}", AGAIN, UNSUPPORTED)


def _routed(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message if a configuration, or one inside it, has more experts per token than per layer."""
    for inner in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        numbers = {name: inner[name] for name in (*EXPERTS, *ROUTED) if type(inner.get(name)) is int}
        most = max((numbers[name] for name in EXPERTS if name in numbers), default=0)
        routed = ((name, numbers[name]) for name in ROUTED if name in numbers)
        yield from (f"{name} {value:,} of {most:,} experts" for name, value in routed if value > most > 0)


def _numbers(config: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield name and value of the integers in a configuration and in those inside it."""
    for name, value in config.items():
        if isinstance(value, Mapping) and depth < MOST_NESTED:
            yield from _numbers(value, depth + 1)
        elif isinstance(value, int) and name != "seed":
            yield str(name), value


INTEGERS = ("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64")
CODED = (*INTEGERS, "F8_E4M3", "F8_E5M2", "F8_E8M0")  # types that need a scale to be weights
WEIGHTS = re.compile(r"weight(_packed)?$")
UNDESCRIBED = (
    "config.json has no quantization_config that says how: download it again, or start from the original "
    "checkpoint"
)


def refuse_codes(infos: Iterable[Any]) -> None:
    """Raise QuantkitError (exit code 4) naming weights with a dtype of codes, if no layout was found.

    infos: `TensorInfo` of a whole checkpoint. Read as plain weights, codes would be nonsense.
    """
    matrices = (info for info in infos if info.dtype in CODED and len(info.shape) > 1)
    names = [info.name for info in matrices if WEIGHTS.search(info.name)]
    require(not names, f"weights are stored as codes: {name_all(names, 3)}", UNDESCRIBED, UNSUPPORTED)


# ---- tokenizers

LARGEST_ID = 1 << 24  # limit of token ids: sixty times that of the largest vocabulary
SUSPICIOUS = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]|[:,\[]\s*\d{8,}\s*[,}\]]')
GROWTH = 64  # characters that a normalizer may make of a single one; NFKC makes up to 18
TEXT = 1 << 16  # characters of a text; a prefix is added once per text


def refuse_tokenizer_file(path: Path) -> None:
    """Raise QuantkitError for a tokenizer.json that would abort the process: the library allocates memory for
    the largest id, and removes continuing_subword_prefix from the second part of every merge without checking
    that it is there."""
    if not path.is_file():
        return
    data = path.read_bytes()
    if not SUSPICIOUS.search(data):  # parsing the largest files takes a second
        return
    try:
        content = parse(data)
        model = content["model"]
        vocabulary = model.get("vocab") or {}
        ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else ())]
        ids += [token["id"] for token in content.get("added_tokens") or ()]
        large = [number for number in ids if number > LARGEST_ID]
        prefix = model.get("continuing_subword_prefix") or ""
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
        lacking = [second for _, second in pairs if not second.startswith(prefix)]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _refused(path, f"is not supported: {error!r}") from error
    if large:
        raise _refused(path, f"gives a token the id {large[0]}")
    if lacking:
        raise _refused(path, f"has merges without its continuing_subword_prefix {prefix!r}")


def _refused(what: object, why: str) -> QuantkitError:
    hint = "it is damaged or not to be trusted: download it again"
    return QuantkitError(f"{what} {why}", hint, UNSUPPORTED)


def refuse_growth(tokenizer: Any) -> None:
    """Raise QuantkitError for a tokenizer whose normalizer makes a text far longer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = getattr(backend, "normalizer", None)
    if normalizer is None:
        return
    grown = _growth(json.loads(normalizer.__getstate__()))
    if grown > GROWTH:
        raise _refused("the model's tokenizer", f"makes up to {min(grown, 1e9):,.0f} characters of one")


def _growth(normalizer: dict) -> float:
    """Return an upper limit of the characters that a normalizer makes of one character."""
    factor = 1.0
    for step in normalizer.get("normalizers") or ():
        factor *= _growth(step)
    written = len(normalizer.get("content") or "")
    pattern = normalizer.get("pattern") or {}
    if "String" in pattern:
        return factor * max(1.0, written / max(1, len(pattern["String"])))
    prepended = len(normalizer.get("prepend") or "") / TEXT  # added once per text
    return factor * max(1.0, (written + 1.0) if pattern else 1.0) + prepended
