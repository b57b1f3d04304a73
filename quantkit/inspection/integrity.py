"""Whether a checkpoint is whole, as far as its headers tell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from quantkit.containers import safetensors_folder
from quantkit.errors import name_all
from quantkit.inspection.contents import Contents
from quantkit.inspection.names import INPUT_EMBEDDINGS, split
from quantkit.inspection.stored import Weight

MLP = re.compile(r"\.mlp\.(gate|up|down|gate_up)_proj\.weight$")
FEW = 0.1  # share of the blocks that may lack a tensor by mistake rather than by design


def of_headers(
    contents: Contents, weights: Sequence[Weight], tokenizer: dict[str, Any] | None
) -> dict[str, Any]:
    """`problems`, each a sentence, and whether values were read."""
    problems = [
        *contents.problems,
        *_index(contents),
        *(
            f"{weight.name}: {weight.codes.problem}"
            for weight in weights
            if weight.codes and weight.codes.problem
        ),
        *_configuration(contents, weights),
        *_blocks(contents, weights),
        *_sizes(contents, weights, tokenizer),
        *_manifest(contents, weights),
    ]
    return {"deep": False, "tensors": len(contents.infos), "problems": problems}


def _index(contents: Contents) -> Iterator[str]:
    """Every tensor of a shard in the index; `read_folder` has refused the reverse."""
    index = contents.json(safetensors_folder.INDEX)
    if index is None:
        return
    mapped = index.get("weight_map")
    lost = [name for name in contents.infos if name not in mapped] if isinstance(mapped, dict) else []
    if lost:
        yield f"{safetensors_folder.INDEX} leaves out {len(lost)} tensors: {name_all(lost, 3)}"
    told = index.get("metadata", {}).get("total_size") if isinstance(index.get("metadata"), dict) else None
    held = sum(info.nbytes for info in contents.infos.values())
    if isinstance(told, int) and told != held:
        yield f"{safetensors_folder.INDEX} says {told} bytes of tensors, the files hold {held}"


def _configuration(contents: Contents, weights: Sequence[Weight]) -> Iterator[str]:
    """Codes and a configuration that tells clients of them come together."""
    coded = sum(weight.codes is not None for weight in weights)
    if contents.container == "safetensors" and coded and not contents.quantization:
        yield f"{coded} linears hold codes, of which config.json says nothing: no client will decode them"


def _blocks(contents: Contents, weights: Sequence[Weight]) -> Iterator[str]:
    """As many blocks as the configuration says, and none that is poorer than nearly all others."""
    held: dict[int, set[str]] = {}
    for weight in weights:
        block, local = split(weight.name)
        if block is not None:
            held.setdefault(block, set()).add(local)
    config = contents.text_config
    depth = config.get("num_hidden_layers") or config.get("n_layer")
    if isinstance(depth, int) and 0 < depth < 10**5 and held:
        absent = [str(block) for block in range(depth) if block not in held]
        if absent:
            yield f"of {depth} blocks, {len(absent)} have no tensors: {name_all(absent)}"
        beyond = [str(block) for block in sorted(held) if block >= depth]
        if beyond:
            yield f"the configuration says {depth} blocks, there are tensors of block {name_all(beyond)}"
    usual = {local for local in set().union(*held.values()) if _share(local, held) >= 1 - FEW}
    for block, locals_ in sorted(held.items()):
        if locals_ < usual and len(held) > 1:  # a block of another kind has tensors of its own
            lacking = sorted(usual - locals_)
            yield f"block {block} lacks {name_all(lacking)}, which the other blocks have"


def _share(local: str, held: dict[int, set[str]]) -> float:
    """Of the blocks, one aside, the part that has a tensor of this name."""
    return sum(local in names for names in held.values()) / max(1, len(held) - 1)


def _sizes(contents: Contents, weights: Sequence[Weight], tokenizer: dict[str, Any] | None) -> Iterator[str]:
    """Shapes against the configuration, where every family means the same by its numbers."""
    config = contents.text_config
    hidden, vocabulary = config.get("hidden_size"), config.get("vocab_size")
    width = config.get("word_embed_proj_dim", hidden)
    intermediate = config.get("intermediate_size")
    for weight in weights:
        shape = weight.shape
        if shape is None or len(shape) != 2:
            continue
        if INPUT_EMBEDDINGS.search(weight.name):
            if isinstance(vocabulary, int) and shape[0] != vocabulary:
                yield f"{weight.name} has {shape[0]} rows, the configuration says {vocabulary} tokens"
            if isinstance(width, int) and shape[1] != width:
                yield f"{weight.name} has {shape[1]} columns, the configuration says {width}"
            tokens = tokenizer["tokens"] if tokenizer else None
            if tokens and tokens > shape[0]:
                yield f"the tokenizer has {tokens} tokens, {weight.name} only {shape[0]} rows"
        if MLP.search(weight.name) and isinstance(intermediate, int):
            if intermediate not in shape and 2 * intermediate not in shape:
                yield f"{weight.name} is {list(shape)}, but intermediate_size is {intermediate}"
        if (
            weight.name.endswith(".self_attn.q_proj.weight")
            and isinstance(hidden, int)
            and shape[1] != hidden
        ):
            yield f"{weight.name} is {list(shape)}, but hidden_size is {hidden}"


def _manifest(contents: Contents, weights: Sequence[Weight]) -> Iterator[str]:
    """The linears that quantkit says it wrote, and no others."""
    manifest = contents.manifest or {}
    rows = manifest.get("linears")
    if contents.container == "gguf" or not isinstance(rows, list):
        return
    told = {row.get("name"): row for row in rows if isinstance(row, dict)}
    coded = {weight.name.removesuffix(".weight"): weight for weight in weights if weight.codes}
    lost = [name for name, row in told.items() if row.get("grid") and name not in coded]
    if lost:
        yield f"{len(lost)} linears that the manifest calls quantized are not: {name_all(map(str, lost), 3)}"
    added = [name for name in coded if name not in told]
    if added:
        yield f"{len(added)} quantized linears are unknown to the manifest: {name_all(added, 3)}"
    for name, weight in coded.items():
        shape = told.get(name, {}).get("shape")
        if weight.shape is not None and shape is not None and list(weight.shape) != shape:
            yield f"{name} is {list(weight.shape)}, the manifest says {shape}"
