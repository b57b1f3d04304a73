"""The tensors that config.json implies for a family of families.py, where there are no headers to read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from quantkit.capacity.families import FAMILIES, Family
from quantkit.capacity.parameters import CONV1D_FAMILIES, DTYPE_BYTES, Parameters, is_tied, make_tensor
from quantkit.capacity.settings import Settings
from quantkit.errors import UNSUPPORTED, QuantkitError

FOURFOLD = ("gpt2", "gptj", "gpt_bigcode", "bloom", "falcon", "mpt")  # where no intermediate size is said
MOST_TENSORS = 1_000_000


def from_config(settings: Settings) -> Parameters:
    """Parameters that a known family has under this configuration.

    Raises QuantkitError (exit code 4) for an unknown one: a guess would be worse than no answer.
    """
    family = FAMILIES.get(settings.model_type)
    if family is None or not _follows(settings):
        raise QuantkitError(
            f"parameters of {settings.model_type} cannot be computed from config.json alone",
            hint="give a folder or hub id with safetensors, whose headers say it exactly, or say how many "
            f"beside it: --params 70B or 671B-A37B; known families: {', '.join(sorted(FAMILIES))}",
            exit_code=UNSUPPORTED,
        )
    element = DTYPE_BYTES[settings.stored_dtype]
    sizes = _sizes(settings)
    switches = _switches(family, settings)
    conv1d = settings.model_type in CONV1D_FAMILIES
    block = list(_expand(family.block, sizes, switches, conv1d))
    if len(block) * settings.layers > MOST_TENSORS:
        raise QuantkitError(
            f"config.json describes {len(block) * settings.layers:,} tensors",
            "it is damaged: download it again",
        )
    shapes = {
        f"{family.blocks}.{k}.{name}": shape for k in range(settings.layers) for name, shape in block
    } | dict(_expand(family.rest, sizes, switches, conv1d))
    tensors = [
        make_tensor(name, shape, element * math.prod(shape), family.blocks, settings)
        for name, shape in shapes.items()
    ]
    return Parameters(tuple(tensors), exact=False, blocks=settings.layers, is_tied=is_tied(settings))


def _follows(settings: Settings) -> bool:
    """Whether all blocks are of the one kind that the templates know."""
    if settings.model_type == "qwen3_moe":
        return settings.get("decoder_sparse_step", default=1) == 1 and not settings.get("mlp_only_layers")
    if settings.model_type == "stablelm":
        return not settings.flag("qk_layernorm")
    return not (settings.model_type == "phi" and settings.flag("qk_layernorm"))


def _sizes(settings: Settings) -> dict[str, int]:
    """The letters of the templates; what a family does not have is left out."""
    hidden, heads, kv_heads, head_dim = settings.hidden, settings.heads, settings.kv_heads, settings.head_dim
    fourfold = settings.size("expansion_ratio", default=4) * hidden
    inner = fourfold if settings.model_type in FOURFOLD else None
    names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    sizes = {
        "h": hidden,
        "q": heads * head_dim,
        "kv": kv_heads * head_dim,
        "n": heads,
        "k": kv_heads,
        "d": head_dim,
        "v": settings.vocabulary,
        "w": settings.size("word_embed_proj_dim", default=hidden),
        "f": settings.size(*names, default=inner),
    }
    if settings.context:
        sizes["p"] = settings.context
    experts = settings.get("num_local_experts", "num_experts")
    if experts is not None:
        sizes["e"] = settings.size("num_local_experts", "num_experts", most=10_000)
        sizes["m"] = settings.size("moe_intermediate_size", default=sizes["f"])
    return sizes


def _switches(family: Family, settings: Settings) -> dict[str, bool]:
    """Every word after `+`, `?` or `!` in the family's lines, and whether it holds."""
    words = set(re.findall(r"[+?!](\w+)", family.block + family.rest))
    switches = {word: settings.flag(word, family.defaults.get(word, False)) for word in words}
    new = settings.flag("new_decoder_architecture")
    tied = settings.flag("tie_word_embeddings", family.tied)
    own = {
        "bias": True,
        "none": False,
        "qkv_bias": settings.flag("bias"),
        "two_norms": new and settings.get("num_ln_in_parallel_attn", default=2) == 2,
        "parallel_attn": new or settings.flag("parallel_attn", True),
        "projects": settings.get("word_embed_proj_dim", default=settings.hidden) != settings.hidden,
    }
    return switches | own | {family.head: not tied}


def _expand(
    lines: str, sizes: dict[str, int], switches: dict[str, bool], conv1d: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that the lines describe; a bias has an entry per output."""
    for line in filter(None, lines.splitlines()):
        name, *words = line.split()
        conditions = [word for word in words if word[0] in "?!"]
        biases = [word[1:] for word in words if word[0] == "+"]
        shape = tuple(_size(word, sizes) for word in words if word[0] not in "+?!")
        if not switches.get(name, True) or any(switches[c[1:]] != (c[0] == "?") for c in conditions):
            continue
        for each in [name.replace("*", str(k)) for k in range(sizes["e"])] if "*" in name else [name]:
            yield f"{each}.weight", shape
            if any(switches[bias] for bias in biases):
                yield f"{each}.bias", shape[-1:] if conv1d else shape[:1]


def _size(expression: str, sizes: dict[str, int]) -> int:
    """The value of `q+2kv`."""
    total = 0
    for term in expression.split("+"):
        factor, symbol = re.fullmatch(r"(\d*)([a-z]*)", term).groups()
        total += int(factor or 1) * (sizes[symbol] if symbol else 1)
    return total
