"""Whether a checkpoint is whole, as far as its headers tell.

Of a model's tensors, blocks and embeddings are counted: which others a family has, and of what shape,
`--deep` asks the model that transformers builds (values.py), which takes five seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

from quantkit.errors import count, name_all
from quantkit.inspection import agreement
from quantkit.inspection.names import INPUT_EMBEDDINGS, language_stack, parent, split, stack_of
from quantkit.inspection.stored import Weight
from quantkit.models.files import safetensors_folder
from quantkit.models.files.headers import Contents

VOCABULARIES = (
    "tokenizer.json", "*.model", "*.tiktoken", "vocab*", "merges.txt", "tekken.json", "*token*.py",
)  # fmt: skip
NUMBERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
MORE_ROWS = re.compile(r"mllama|moshi|molmo")  # families whose embeddings have rows of their own besides
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def damage(contents: Contents, weights: Sequence[Weight], tokenizer: dict[str, Any] | None) -> list[str]:
    """What keeps clients from loading a checkpoint, or from loading what was meant; each a sentence."""
    found = [
        *_index(contents),
        *_configuration(contents, weights),
        *agreement.problems(contents, weights),
        *model_problems(contents, weights, tokenizer),
    ]
    return contents.problems + found  # reading may have found more of them on the way


def contradictions(contents: Contents, weights: Sequence[Weight]) -> list[str]:
    """What is wrong with records of a checkpoint that clients do not look at: sizes, and the manifest."""
    found = [*_total(contents), *_manifest(contents, weights)]
    return contents.problems + found


def warnings(contents: Contents) -> list[str]:
    """What is not wrong, but rarely meant."""
    return [*_tokenizer(contents), *_special(contents)]


def _tokenizer(contents: Contents) -> Iterator[str]:
    if contents.container == "gguf":
        absent = "tokenizer.ggml.model" not in contents.metadata
    else:
        absent = not any(fnmatch(name, pattern) for name in contents.files for pattern in VOCABULARIES)
    if absent:
        yield "there is no tokenizer: clients load the weights alone"


def _special(contents: Contents) -> Iterator[str]:
    """Tokens that end or begin a text are tokens of the vocabulary."""
    config = contents.text_config
    size = config.get("vocab_size")
    for key in SPECIAL_IDS if isinstance(size, int) else ():
        ids = config.get(key) if isinstance(config.get(key), list) else [config.get(key)]
        beyond = [str(place) for place in ids if type(place) is int and place >= size]
        if beyond:
            yield f"{key} is {name_all(beyond)}, but the vocabulary has {count(size, 'token')}"


def model_problems(
    contents: Contents, weights: Sequence[Weight], tokenizer: dict[str, Any] | None
) -> Iterator[str]:
    """Blocks that are absent or too many, and embeddings that the configuration or tokenizer contradicts.

    Not judged where it is not clear which stack of blocks is the language model.
    """
    config = contents.text_config
    for key in NUMBERS:
        if isinstance(config.get(key), str):
            yield f"{key} of config.json is text: {config[key]!r}"
    stack = language_stack([weight.name for weight in weights])
    if stack is None:
        return
    if not contents.absent:
        yield from _blocks(config, {split(w.name)[0] for w in weights if stack_of(w.name) == stack})
    for weight in weights:
        own = split(weight.name)[0] is None and weight.name.startswith(parent(stack))
        if own and INPUT_EMBEDDINGS.search(weight.name) and len(weight.shape or ()) == 2:
            yield from _embeddings(config, weight, tokenizer["tokens"] if tokenizer else None)


def _number(config: dict[str, Any], *keys: str) -> int:
    """The first of a configuration's numbers that makes sense; 0 for none."""
    values = (config.get(key) for key in keys)
    return next((value for value in values if type(value) is int and value > 0), 0)


def _blocks(config: dict[str, Any], held: set[int | None]) -> Iterator[str]:
    """As many blocks as the configuration says."""
    depth = _number(config, "num_hidden_layers", "n_layer")
    if not 0 < depth < 10**5:
        return
    absent = [str(block) for block in range(depth) if block not in held]
    if absent:
        yield f"of {count(depth, 'block')}, {len(absent)} without tensors: {name_all(absent)}"
    last = depth + _number(config, "num_nextn_predict_layers")  # these predict further tokens
    if beyond := [str(block) for block in sorted(held) if block >= last]:
        yield f"the configuration says {depth} blocks, there are tensors of block {name_all(beyond)}"


def _embeddings(config: dict[str, Any], weight: Weight, tokens: int | None) -> Iterator[str]:
    """A row for every token, a column for every hidden feature."""
    vocabulary, width = _number(config, "vocab_size"), _number(config, "word_embed_proj_dim", "hidden_size")
    more = MORE_ROWS.match(str(config.get("model_type")))
    rows, columns = weight.shape
    if vocabulary and rows != vocabulary and not (more and rows > vocabulary):
        yield f"{weight.name} has {rows} rows, the configuration says {vocabulary} tokens"
    if width and columns != width:
        yield f"{weight.name} has {columns} columns, the configuration says {width}"
    if tokens and tokens > rows:
        yield f"the tokenizer has {tokens} tokens, {weight.name} only {rows} rows"


def _index(contents: Contents) -> Iterator[str]:
    """Every tensor of a shard in the index; `read_folder` has told of the reverse."""
    mapped = (contents.index or {}).get("weight_map")
    lost = [name for name in contents.infos if name not in mapped] if isinstance(mapped, dict) else []
    if lost:
        yield f"{safetensors_folder.INDEX} leaves out {count(len(lost), 'tensor')}: {name_all(lost, 3)}"


def _total(contents: Contents) -> Iterator[str]:
    index = contents.index or {}
    told = index.get("metadata", {}).get("total_size") if isinstance(index.get("metadata"), dict) else None
    held = sum(info.nbytes for info in contents.infos.values())
    if isinstance(told, int) and told != held and not contents.absent:
        yield f"{safetensors_folder.INDEX} says {told} bytes of tensors, the files hold {held}"


def _configuration(contents: Contents, weights: Sequence[Weight]) -> Iterator[str]:
    """Codes and a configuration that tells clients of them come together."""
    if not contents.infos and not contents.absent:
        yield "there are no tensors"
    coded = sum(weight.codes is not None for weight in weights)
    if contents.container == "safetensors" and coded and not contents.quantization:
        yield f"config.json says nothing of the codes of {count(coded, 'linear')}: no client decodes them"
    stored = contents.config.get("quantization_config")
    if coded and stored is not None and not isinstance(stored, dict):
        yield f"quantization_config is {stored!r}, no object of bits and groups"


def _manifest(contents: Contents, weights: Sequence[Weight]) -> Iterator[str]:
    """The linears that quantkit says it wrote, and no others."""
    manifest = contents.manifest or {}
    rows = manifest.get("linears")
    if contents.container == "gguf" or not isinstance(rows, list):
        return
    told = {str(row.get("name")): row for row in rows if isinstance(row, dict)}
    coded = {weight.name.removesuffix(".weight"): weight for weight in weights if weight.codes}
    lost = [name for name, row in told.items() if row.get("grid") and name not in coded]
    if lost and not contents.absent:
        named = name_all(map(str, lost), 3)
        yield f"the manifest calls {count(len(lost), 'linear')} quantized that hold no codes: {named}"
    added = [name for name in coded if name not in told]
    if added:
        yield f"the manifest leaves out {count(len(added), 'quantized linear')}: {name_all(added, 3)}"
    for name, weight in coded.items():
        shape = told.get(name, {}).get("shape")
        if weight.shape is not None and shape is not None and list(weight.shape) != shape:
            yield f"{name} is {list(weight.shape)}, the manifest says {shape}"
