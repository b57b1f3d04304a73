"""Bytes of a model's tensors in a GGUF file of each type: llama-quantize's choice, tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from quantkit.capacity import Unsupported
from quantkit.capacity.parameters import MOST_EXPERTS, Parameters, Tensor
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


FEWEST_OF_LARGE = 20_000_000_000  # parameters


@cache
def typical_bits(file_type: str, count: int) -> float:
    """Return bits per weight of a file of Llama 3 8B, or of 70B from FEWEST_OF_LARGE parameters on.

    A mixture takes more than the bits of its base type: 4.8 to 4.9 instead of 4.5 for Q4_K_M.
    """
    table = Path(__file__).with_name("gguf_bits.json").read_text(encoding="utf-8")
    return json.loads(table)[file_type][count >= FEWEST_OF_LARGE]


def file_bytes(file_type: str, parameters: Parameters, settings: Settings) -> tuple[int, int, int, int]:
    """Return (bytes of all tensors with padding, bytes of the blocks' linears, bytes that a token reads,
    weights of the blocks' linears) of a model in a file of this type.

    A token reads the routed experts, and no lookup tables. Raises Unsupported for a family that llama.cpp or
    quantkit's exporter does not know.
    """
    row = next((row for row in architectures.TABLE if settings.model_type in row.model_types), None)
    if row is None:
        raise Unsupported(f"{settings.model_type} has no GGUF architecture that quantkit knows")
    # the exporter joins and splits experts: its own list, from a model built of shapes alone
    built = row.mixture or row.hybrid
    named = settings.gguf_tensors if built else _of_dense(row, parameters)
    keys = ("expert_count", "expert_used_count") if row.mixture else ()
    experts, chosen = [settings.size(row.fields[key], most=MOST_EXPERTS) for key in keys] or (0, 0)
    model = Model(row.name, settings.layers, settings.heads, settings.kv_heads, experts)
    total = 0 if built else _factors(settings)
    packed, weights, unread = 0, 0, 0
    has_output = any(name == mixtures.OUTPUT for name, _ in named)
    for choice, (name, shape) in zip(mixtures.choose(file_type, model, named), named, strict=True):
        nbytes = mixtures.nbytes(choice.type, shape)
        padded = _padded(nbytes)
        if scale := mixtures.scale_of(name, choice.type, shape):
            nbytes, padded = nbytes + 4 * scale[1][0], padded + _padded(4 * scale[1][0])
        total += padded
        if name.startswith("blk.") and choice.type != "F32":
            packed, weights = packed + nbytes, weights + math.prod(shape)
        if name.startswith("position_embd") or (name == mixtures.EMBEDDING and has_output):
            unread += padded
        elif "_exps." in name:
            unread += padded * (experts - chosen) // experts
    return total, packed, total - unread, weights


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _of_dense(row: Architecture, parameters: Parameters) -> Named:
    """Return the tensors of a dense model from names and shapes, without transformers."""
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
    """Return a tensor name that the mixtures treat like llama.cpp's own."""
    module, _, leaf = tensor.name.rpartition(".")
    if tensor.block is None:
        last = module.rpartition(".")[2]
        for names, name in ((EMBEDDINGS, "token_embd"), (POSITIONS, "position_embd"), (HEADS, "output")):
            if last in names:
                return f"{name}.{leaf}"
        return f"{last}_norm.{leaf}"
    return f"blk.{tensor.block}.{tensor.projection or tensor.local.removesuffix(f'.{leaf}')}.{leaf}"


def _factors(settings: Settings) -> int:
    """Return bytes of the divisors of rotary frequencies, added by two kinds of scaling."""
    rope = settings.get("rope_scaling", "rope_parameters", default={})
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if kind == "llama3":
        return _padded(settings.head_dim * 2)
    if kind in ("longrope", "su"):
        return 2 * _padded(4 * len(rope.get("long_factor") or ()))
    return 0
