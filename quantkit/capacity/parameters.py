"""The tensors of a model and what they are for: exact from headers, computed for the known families."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from quantkit.capacity.families import FAMILIES, Family
from quantkit.capacity.settings import Settings
from quantkit.containers.safetensors_folder import TensorInfo, natural
from quantkit.errors import UNSUPPORTED, QuantkitError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
CONV1D_FAMILIES = ("gpt2", "openai-gpt")  # linears stored [in, out]
FOURFOLD = ("gpt2", "gptj", "gpt_bigcode", "bloom", "falcon", "mpt")  # where no intermediate size is said
MOST_TENSORS = 1_000_000
BLOCK = re.compile(r"(?P<blocks>.+?)\.(?P<index>\d+)\.(?P<local>.+)")
# Masks and frequencies that old checkpoints carry along: no parameters.
BUFFER = re.compile(r"(\.(attn|attention)\.(masked_)?bias|\.inv_freq|position_ids)$")
ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)$")
EXPERT = re.compile(r"\.experts(\.|$)")


@dataclass(frozen=True)
class Tensor:
    """A stored tensor. block: index of its decoder block, None outside; local: its name inside it.

    out_features, in_features: of a linear of a block, 0 otherwise. conv1d: it is stored `[in, out]`.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    block: int | None = None
    local: str = ""
    out_features: int = 0
    in_features: int = 0
    conv1d: bool = False

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def is_linear(self) -> bool:
        return self.in_features > 0

    @property
    def is_expert(self) -> bool:
        return self.block is not None and bool(EXPERT.search(f".{self.local}"))


@dataclass(frozen=True)
class Parameters:
    """All tensors of a model, buffers left out. exact: they were read; else computed from config.json."""

    tensors: tuple[Tensor, ...]
    exact: bool
    is_tied: bool = False

    @property
    def linears(self) -> list[Tensor]:
        """Linears of the blocks: what methods quantize."""
        return [tensor for tensor in self.tensors if tensor.is_linear]

    @property
    def rest(self) -> list[Tensor]:
        """Everything else: embeddings, head, norms, biases, routers."""
        return [tensor for tensor in self.tensors if not tensor.is_linear]

    @property
    def fused_experts(self) -> bool:
        """Whether all experts of a block are one tensor, `[experts, …]`."""
        return any(tensor.is_expert and len(tensor.shape) > 2 for tensor in self.tensors)

    @cached_property
    def head_copy(self) -> Tensor | None:
        """A stored head that is the embedding once more: no parameters of its own."""
        if not self.is_tied:
            return None
        outside = [tensor for tensor in self.tensors if tensor.block is None and len(tensor.shape) == 2]
        heads = [
            tensor
            for tensor in outside
            if re.search(r"(^|\.)(lm_head|embed_out|output)\.weight$", tensor.name)
        ]
        twins = [
            head for head in heads if any(head.shape == other.shape for other in outside if other is not head)
        ]
        return twins[0] if twins else None

    @property
    def count(self) -> int:
        """Number of parameters, a tied head counted once."""
        return sum(t.size for t in self.tensors) - (self.head_copy.size if self.head_copy else 0)

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def active(self, settings: Settings) -> int:
        """Parameters that a token meets: of experts only those it is routed to."""
        experts = sum(tensor.size for tensor in self.tensors if tensor.is_expert)
        if not experts:
            return self.count
        chosen = settings.size("num_experts_per_tok", "moe_topk", "num_experts_per_token")
        of = settings.size("num_local_experts", "num_experts", "n_routed_experts")
        return self.count - experts + experts * chosen // of


def from_headers(infos: Iterable[TensorInfo], settings: Settings) -> Parameters:
    """Parameters as they are stored. Raises QuantkitError if no list of blocks fits the configuration."""
    infos = [info for info in infos if not BUFFER.search(info.name)]
    blocks = _find_blocks([info.name for info in infos], settings)
    tensors = [
        _tensor(info.name, info.shape, info.nbytes, blocks, settings)
        for info in sorted(infos, key=lambda info: natural(info.name))
    ]
    return Parameters(tuple(tensors), exact=True, is_tied=_is_tied(settings))


def from_config(settings: Settings) -> Parameters:
    """Parameters that a known family has under this configuration.

    Raises QuantkitError (exit code 4) for an unknown one: a guess would be worse than no answer.
    """
    family = FAMILIES.get(settings.model_type)
    if family is None or not _follows(settings):
        raise QuantkitError(
            f"parameters of {settings.model_type} cannot be computed from config.json alone",
            hint="give a folder or hub id with safetensors, whose headers say it exactly, or --params; "
            f"known families: {', '.join(sorted(FAMILIES))}",
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
        _tensor(name, shape, element * math.prod(shape), family.blocks, settings)
        for name, shape in shapes.items()
    ]
    return Parameters(tuple(tensors), exact=False, is_tied=_is_tied(settings))


def _follows(settings: Settings) -> bool:
    """Whether all blocks are of the one kind that the templates know."""
    if settings.model_type == "qwen3_moe":
        return settings.get("decoder_sparse_step", default=1) == 1 and not settings.get("mlp_only_layers")
    if settings.model_type == "stablelm":
        return not settings.flag("qk_layernorm")
    return not (settings.model_type == "phi" and settings.flag("qk_layernorm"))


def _is_tied(settings: Settings) -> bool:
    family = FAMILIES.get(settings.model_type)
    return settings.flag("tie_word_embeddings", family.tied if family else False)


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


def _tensor(name: str, shape: tuple[int, ...], nbytes: int, blocks: str, settings: Settings) -> Tensor:
    """A tensor with its place in the model."""
    match = BLOCK.fullmatch(name) if name.startswith(f"{blocks}.") else None
    if match is None or match["blocks"] != blocks:
        return Tensor(name, shape, nbytes)
    index, local = int(match["index"]), match["local"]
    module, _, leaf = local.rpartition(".")
    plain = len(shape) == 2 and leaf == "weight" and "norm" not in module and not ROUTER.search(module)
    if not plain or not all(shape):
        return Tensor(name, shape, nbytes, index, local)
    conv1d = settings.model_type in CONV1D_FAMILIES
    out_features, in_features = shape[::-1] if conv1d else shape
    return Tensor(name, shape, nbytes, index, local, out_features, in_features, conv1d)


def _find_blocks(names: Iterable[str], settings: Settings) -> str:
    """Name of the list as long as the configuration says the model is deep."""
    indices: dict[str, set[int]] = {}
    for name in names:
        if match := BLOCK.fullmatch(name):
            indices.setdefault(match["blocks"], set()).add(int(match["index"]))
    wanted = set(range(settings.layers))
    further = settings.layers + (
        settings.get("num_nextn_predict_layers", default=0) and 1
    )  # kept beside them
    found = [blocks for blocks, seen in indices.items() if wanted <= seen <= set(range(further))]
    found = [blocks for blocks in found if not re.search("vision|visual|audio", blocks)] or found
    if len(found) != 1:
        raise QuantkitError(
            f"config.json says {settings.layers} blocks, {len(found) or 'no'} lists of so many are stored",
            hint="config.json and weights belong to different models, or the download is incomplete",
        )
    return found[0]
