"""Bytes of a model's tensors in a GGUF file of each type: llama-quantize's choice, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from quantkit.capacity import Unsupported
from quantkit.capacity.parameters import MOST_EXPERTS, Parameters, Tensor, from_headers
from quantkit.capacity.settings import Settings
from quantkit.models.gguf import architectures, mixtures
from quantkit.models.gguf.architectures import Architecture
from quantkit.models.gguf.file_types import FILE_TYPES as ALL_FILE_TYPES
from quantkit.models.gguf.file_types import Model

ALIGNMENT = 32
Named = Sequence[tuple[str, tuple[int, ...]]]  # GGUF name and shape of every tensor of a file, in its order
FILE_TYPES = tuple(name for name in ALL_FILE_TYPES if name not in ("F32", "F16", "BF16"))
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in")
POSITIONS, HEADS = ("wpe", "embed_positions"), ("lm_head", "embed_out")


@dataclass(frozen=True)
class FileBytes:
    """total: of all tensors, padded as they lie in the file; packed: of the blocks' linears, which have so
    many `weights`; read: of what a token reads, all but the rows of tables that it looks up, and of experts
    those it is routed to."""

    total: int
    packed: int
    read: int
    weights: int


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
    return 8 * found.total / parameters.count, 8 * found.packed / found.weights


def file_bytes(file_type: str, parameters: Parameters, settings: Settings) -> FileBytes:
    """Bytes of a model in a file of this type.

    Raises Unsupported for a family that llama.cpp, or quantkit's exporter, does not know.
    """
    row = next((row for row in architectures.TABLE if settings.model_type in row.model_types), None)
    if row is None or row.latent:
        raise Unsupported(f"{settings.model_type} has no GGUF architecture that quantkit knows")
    # experts are put together and apart: as the exporter has it, whose model is built in shapes alone
    named = settings.gguf_tensors if row.mixture or row.hybrid else _of_dense(row, parameters)
    experts, chosen = _experts(row, settings)
    model = Model(row.name, settings.layers, settings.heads, settings.kv_heads, experts)
    total = 0 if row.mixture or row.hybrid else _factors(settings)
    packed, weights, unread = 0, 0, 0
    has_output = any(name == mixtures.OUTPUT for name, _ in named)
    for choice, (name, shape) in zip(mixtures.choose(file_type, model, named), named, strict=True):
        nbytes = mixtures.nbytes(choice.type, shape)
        padded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if scale := mixtures.scale_of(name, choice.type, shape):
            nbytes, padded = nbytes + 4 * scale[1][0], padded + -(-4 * scale[1][0] // ALIGNMENT) * ALIGNMENT
        total += padded
        if name.startswith("blk.") and choice.type != "F32":
            packed, weights = packed + nbytes, weights + math.prod(shape)
        if name.startswith("position_embd") or (name == mixtures.EMBEDDING and has_output):
            unread += padded
        elif "_exps." in name:
            unread += padded * (experts - chosen) // experts
    return FileBytes(total, packed, total - unread, weights)


def _experts(row: Architecture, settings: Settings) -> tuple[int, int]:
    """Experts of a layer, and of them those a token is routed to; none of a dense model."""
    if not row.mixture:
        return 0, 0
    of, chosen = (
        settings.size(row.fields[key], most=MOST_EXPERTS) for key in ("expert_count", "expert_used_count")
    )
    return of, chosen


def _of_dense(row: Architecture, parameters: Parameters) -> Named:
    """From names and shapes, without asking transformers."""
    tied = row.head == "never" or (row.head != "always" and parameters.is_tied)
    named = [
        (_name(one), (one.out_features, one.in_features) if one.is_linear else one.shape)
        for one in parameters.language_model
    ]
    named = [(name, shape) for name, shape in named if not (tied and name == mixtures.OUTPUT)]
    if row.head == "always" and parameters.is_tied and not any(name == mixtures.OUTPUT for name, _ in named):
        embedding = next(shape for name, shape in named if name == mixtures.EMBEDDING)
        named.append((mixtures.OUTPUT, embedding))
    return sorted(named, key=lambda pair: mixtures.order(pair[0]))


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


def _factors(settings: Settings) -> int:
    """Bytes of the divisors of rotary frequencies, which two kinds of scaling add."""
    rope = settings.get("rope_scaling", "rope_parameters", default={})
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if kind == "llama3":
        return -(-settings.head_dim * 2 // ALIGNMENT) * ALIGNMENT
    if kind in ("longrope", "su"):
        return 2 * -(-4 * len(rope.get("long_factor") or ()) // ALIGNMENT) * ALIGNMENT
    return 0
