"""Finds damage in a checkpoint from its headers.

Only blocks, embeddings and quantized linears are checked. With `--deep`, values.py compares all tensors with
the model that transformers builds, which takes five seconds.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

from quantkit import layouts
from quantkit.errors import UNSUPPORTED, QuantkitError, count, name_all
from quantkit.inspection.names import language_stack, parent, split
from quantkit.inspection.stored import Weight
from quantkit.models.files import safetensors_folder
from quantkit.models.files.head import EMBEDDING
from quantkit.models.files.headers import Contents

VOCABULARIES = (
    "tokenizer.json", "*.model", "*.tiktoken", "vocab*", "merges.txt", "tekken.json", "*token*.py",
)  # fmt: skip
CODE_TYPES = {"I8", "U8", "I32", "U32", "F8_E4M3", "F8_E5M2"}  # types of matrices that need scales


def damage(contents: Contents, weights: Sequence[Weight], tokenizer: dict[str, Any] | None) -> list[str]:
    """Return a sentence for each defect because of which clients cannot load the checkpoint correctly."""
    problems = [*_index(contents), *_quantization(contents, weights)]
    problems += model_problems(contents, weights, tokenizer)
    return contents.problems + problems  # reading headers may have added problems


def warnings(contents: Contents) -> list[str]:
    """Return a sentence for each property that is rarely intended, but not an error."""
    if contents.container == "gguf":
        absent = "tokenizer.ggml.model" not in contents.metadata
    else:
        absent = not any(fnmatch(name, pattern) for name in contents.files for pattern in VOCABULARIES)
    notes = ["there is no tokenizer: clients load the weights alone"] if absent else []
    local = contents.path is not None and contents.head.note  # values on the hub are unknown
    return notes + [contents.head.note] * bool(local)


def _quantization(contents: Contents, weights: Sequence[Weight]) -> Iterator[str]:
    """Yield problems: linears that their layout cannot decode, and codes without a known layout."""
    if not contents.infos and not contents.absent:
        yield "there are no tensors"
    if contents.container == "gguf":
        return
    try:
        layout = layouts.detect(contents.config)
    except QuantkitError as error:
        layout = None
        if error.exit_code != UNSUPPORTED:  # an unsupported format is not damage
            yield error.message
    wrong: dict[str, list[str]] = {}
    for weight in weights:
        if weight.codes and weight.codes.problem:
            wrong.setdefault(weight.codes.problem, []).append(weight.name.removesuffix(".weight"))
    yield from (f"{name_all(linears, 3)}: {problem}" for problem, linears in wrong.items())
    parts = tuple(f".{part}" for part in layout.suffixes if part != "weight") if layout else ()
    stray = sorted(weight.name for weight in weights if not weight.codes and _is_coded(weight, parts))
    if not stray or contents.absent:  # in the latter case, the rest may lie in a shard that could not be read
        return
    if not contents.quantization:
        yield f"config.json says nothing of the codes in {name_all(stray, 3)}: no client decodes them"
    elif layout:
        yield f"these tensors belong to no whole quantized linear: {name_all(stray, 3)}"


def _is_coded(weight: Weight, parts: tuple[str, ...]) -> bool:
    """Return whether a tensor is a matrix of integers, or is named like `parts` of quantized linears."""
    return weight.name.endswith(parts) or (weight.dtype in CODE_TYPES and len(weight.shape or ()) == 2)


def model_problems(
    contents: Contents, weights: Sequence[Weight], tokenizer: dict[str, Any] | None
) -> Iterator[str]:
    """Yield problems: missing or extra blocks, and embeddings that contradict configuration or tokenizer.
    Yields nothing if it is unclear which stack of blocks is the language model."""
    config = contents.text_config
    for name, value in config.items():
        if isinstance(value, str) and (name.startswith("num_") or name.endswith("_size")):
            yield f"config.json: {name} is the text {value!r}, not a number"
    stack = language_stack([weight.name for weight in weights])
    if stack is None:
        return
    if not contents.absent:
        blocks = (split(weight.name)[:2] for weight in weights)
        yield from _blocks(config, {block for owner, block in blocks if owner == stack})
    for weight in weights:
        outside = split(weight.name)[1] is None and weight.name.startswith(parent(stack))
        if outside and EMBEDDING.fullmatch(weight.name) and len(weight.shape or ()) == 2:
            yield from _embeddings(config, weight, tokenizer["tokens"] if tokenizer else None)


def _number(config: dict[str, Any], *keys: str) -> int:
    """Return the first valid number of a configuration under these keys; 0 if there is none."""
    values = (config.get(key) for key in keys)
    return next((value for value in values if type(value) is int and value > 0), 0)


def _blocks(config: dict[str, Any], stored: set[int | None]) -> Iterator[str]:
    """Yield problems: stored blocks that are not those of the configuration."""
    depth = _number(config, "num_hidden_layers", "n_layer")
    if not 0 < depth < 10**5:
        return
    absent = [str(block) for block in range(depth) if block not in stored]
    if absent:
        yield f"of {count(depth, 'block')}, {len(absent)} without tensors: {name_all(absent)}"
    last = depth + _number(config, "num_nextn_predict_layers")  # these predict further tokens
    if beyond := [str(block) for block in sorted(stored) if block >= last]:
        yield f"the configuration says {depth} blocks, there are tensors of block {name_all(beyond)}"


def _embeddings(config: dict[str, Any], weight: Weight, tokens: int | None) -> Iterator[str]:
    """Yield problems: embeddings with too few rows for the tokens, or not hidden_size columns."""
    vocabulary, width = _number(config, "vocab_size"), _number(config, "word_embed_proj_dim", "hidden_size")
    rows, columns = weight.shape
    if rows < vocabulary:
        yield f"{weight.name} has {rows} rows, the configuration says {vocabulary} tokens"
    if width and columns != width:
        yield f"{weight.name} has {columns} columns, the configuration says {width}"
    if tokens and tokens > rows:
        yield f"the tokenizer has {tokens} tokens, {weight.name} only {rows} rows"


def _index(contents: Contents) -> Iterator[str]:
    """Yield problems: stored tensors that the index does not list; `read_folder` checks the reverse."""
    mapped = (contents.index or {}).get("weight_map")
    lost = [name for name in contents.infos if name not in mapped] if isinstance(mapped, dict) else []
    if lost:
        yield f"{safetensors_folder.INDEX} leaves out {count(len(lost), 'tensor')}: {name_all(lost, 3)}"
