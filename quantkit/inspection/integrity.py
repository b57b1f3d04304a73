"""Whether a checkpoint is whole, as far as its headers tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

from quantkit.errors import count, name_all
from quantkit.inspection import agreement, architecture
from quantkit.inspection.stored import Weight
from quantkit.models.files import safetensors_folder
from quantkit.models.headers import Contents

VOCABULARIES = (
    "tokenizer.json", "*.model", "*.tiktoken", "vocab*", "merges.txt", "tekken.json", "*token*.py",
)  # fmt: skip
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def damage(contents: Contents, weights: Sequence[Weight], tokenizer: dict[str, Any] | None) -> list[str]:
    """What keeps clients from loading a checkpoint, or from loading what was meant; each a sentence."""
    found = [
        *_index(contents),
        *_configuration(contents, weights),
        *agreement.problems(contents, weights),
        *architecture.problems(contents, weights, tokenizer),
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
