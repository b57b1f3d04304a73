"""Bytes of a model's tensors in a GGUF file of each type: llama-quantize's choice, tensor by tensor."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache

from quantkit.capacity.parameters import Parameters, Tensor, from_headers
from quantkit.capacity.settings import Settings
from quantkit.models.llamacpp import architectures, mixtures
from quantkit.models.llamacpp.file_types import FILE_TYPES as ALL_FILE_TYPES
from quantkit.models.llamacpp.file_types import Model

ALIGNMENT = 32
FILE_TYPES = tuple(name for name in ALL_FILE_TYPES if name not in ("F32", "F16", "BF16"))
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in")
POSITIONS, HEADS = ("wpe", "embed_positions"), ("lm_head", "embed_out")


class Unfit(Exception):
    """Why there is no GGUF file of a model."""


@dataclass(frozen=True)
class FileBytes:
    """total: of all tensors, padded as they lie in the file; packed: of the blocks' linears; read: of what a
    token reads, all but the rows of tables that it looks up."""

    total: int
    packed: int
    read: int


# Shapes that stand for a model of which only the number of parameters is known, Llama 3 8B and 70B: hidden
# and intermediate size, blocks, heads.
SMALL, LARGE = (4096, 14336, 32, 32), (8192, 28672, 80, 64)
FEWEST_OF_LARGE = 20_000_000_000  # parameters


@cache
def typical_bits(file_type: str, count: int) -> tuple[float, float]:
    """Bits per weight of a whole file, and of its blocks' linears, in a Llama of about so many parameters.

    A mixture spends more than the bits of its base type: 4.8 to 4.9 instead of 4.5 for Q4_K_M.
    """
    hidden, inner, blocks, heads = LARGE if count >= FEWEST_OF_LARGE else SMALL
    values = {"model_type": "llama", "num_hidden_layers": blocks, "num_attention_heads": heads}
    shapes = {f"{name}.weight": (128256, hidden) for name in ("model.embed_tokens", "lm_head")}
    shapes["model.norm.weight"] = (hidden,)
    linears = {"q_proj": hidden, "k_proj": 1024, "v_proj": 1024, "gate_proj": inner, "up_proj": inner}
    for block in range(blocks):
        prefix = f"model.layers.{block}."
        shapes |= {f"{prefix}{name}.weight": (rows, hidden) for name, rows in linears.items()}
        shapes |= {f"{prefix}o_proj.weight": (hidden, hidden), f"{prefix}down_proj.weight": (hidden, inner)}
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    entries = [Tensor(name, shape, 2 * math.prod(shape)) for name, shape in shapes.items()]
    parameters, settings = from_headers(entries, Settings(values | {"tie_word_embeddings": False}))
    found = file_bytes(file_type, parameters, settings)
    linears = sum(tensor.size for tensor in parameters.linears)
    return 8 * found.total / parameters.count, 8 * found.packed / linears


def file_bytes(file_type: str, parameters: Parameters, settings: Settings) -> FileBytes:
    """Bytes of a model in a file of this type.

    Raises Unfit for a family that llama.cpp, or quantkit's exporter, does not know.
    """
    row = next((row for row in architectures.TABLE if settings.model_type in row.model_types), None)
    if row is None:
        raise Unfit(f"{settings.model_type} has no GGUF architecture that quantkit knows")
    if row.mixture:
        raise Unfit("sizes of mixtures of experts are what quantkit gguf MODEL --dry-run says")
    model = Model(row.name, settings.layers, settings.heads, settings.kv_heads)
    tied = row.head == "never" or (row.head != "always" and parameters.is_tied)
    named = _named(parameters, tied)
    if row.head == "always" and parameters.is_tied and not any(name == mixtures.OUTPUT for name, _ in named):
        embedding = next(shape for name, shape in named if name == mixtures.EMBEDDING)
        named.append((mixtures.OUTPUT, embedding))
    named.sort(key=lambda pair: _order(pair[0]))
    total, packed, looked_up = _factors(settings), 0, 0
    has_output = any(name == mixtures.OUTPUT for name, _ in named)
    for choice, (name, shape) in zip(mixtures.choose(file_type, model, named), named, strict=True):
        nbytes = mixtures.nbytes(choice.type, shape)
        total += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if name.startswith("blk.") and choice.type != "F32":
            packed += nbytes
        if name.startswith("position_embd") or (name == mixtures.EMBEDDING and has_output):
            looked_up += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return FileBytes(total, packed, total - looked_up)


def _named(parameters: Parameters, tied: bool) -> list[tuple[str, tuple[int, ...]]]:
    """`(GGUF name, shape)` of every tensor in the file, a tied head left out."""
    named = [(_name(tensor), _shape(tensor)) for tensor in parameters.tensors]
    return [(name, shape) for name, shape in named if not (tied and name == mixtures.OUTPUT)]


def _name(tensor: Tensor) -> str:
    """A name that the mixtures understand as they do llama.cpp's own."""
    module, _, leaf = tensor.name.rpartition(".")
    if tensor.block is None:
        last = module.rpartition(".")[2]
        for names, name in ((EMBEDDINGS, "token_embd"), (POSITIONS, "position_embd"), (HEADS, "output")):
            if last in names:
                return f"{name}.{leaf}"
        return f"{last}_norm.{leaf}"
    return f"blk.{tensor.block}.{tensor.projection or tensor.local.removesuffix(f'.{leaf}')}.{leaf}"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.out_features, tensor.in_features) if tensor.is_linear else tensor.shape


def _order(name: str) -> tuple[int, str]:
    block = re.match(r"blk\.(\d+)\.", name)
    return int(block[1]) if block else -1, name


def _factors(settings: Settings) -> int:
    """Bytes of the divisors of rotary frequencies, which two kinds of scaling add."""
    rope = settings.get("rope_scaling", "rope_parameters", default={})
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if kind == "llama3":
        return -(-settings.head_dim * 2 // ALIGNMENT) * ALIGNMENT
    if kind in ("longrope", "su"):
        return 2 * -(-4 * len(rope.get("long_factor") or ()) // ALIGNMENT) * ALIGNMENT
    return 0
