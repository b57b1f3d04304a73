"""Rounding of quantized key/value caches, as engines compute it.

All take and return `[batch, heads, tokens, head_dim]` in the precision of the model, as a Hugging Face cache
does, a batch of sequences that do not know of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.ggml import named as ggml_grid
from quantkit.grids.grid import group
from quantkit.models.kv_types import BLOCK, TYPES
from quantkit.quantize.transforms.rotation.orthogonal import sylvester

ROTATED = 64  # least size of llama.cpp's rotations


@dataclass(frozen=True)
class KvRounding:
    """The rounding of keys and values. Every token is rounded, also for its own query."""

    keys: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]


def named(name: str) -> KvRounding:
    """Return the rounding of a name of `kv_types.TYPES`. Raises QuantkitError for caches of transformers,
    which keep the last 128 tokens as they are."""
    if TYPES[name].keeper.startswith("transformers"):
        hint = "choose q8_0 or q4_0 (llama.cpp), fp8 (vLLM) or a float"
        raise QuantkitError(f"--kv-dtype {name}: caches of transformers are not measured", hint, UNSUPPORTED)
    if name in ("float32", "bfloat16", "float16"):
        return KvRounding(*[partial(_cast, getattr(torch, name))] * 2)
    if name == "fp8":
        return KvRounding(_fp8, _fp8)
    grid = name.upper()
    return KvRounding(partial(_ggml, grid, False), partial(_ggml, grid, True))


def _cast(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype).to(x.dtype)


def _fp8(x: Tensor) -> Tensor:
    """Round as vLLM's `fp8`: e4m3 by a scale of 1, larger values become the largest."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-most, most).to(torch.float8_e4m3fn).to(x.dtype)


def scaled(keys: Tensor, values: Tensor) -> KvRounding:
    """`fp8` with calibrated scales, one number each, as checkpoints store them (`k_scale`, `v_scale`)."""
    return KvRounding(partial(_fp8_scaled, keys), partial(_fp8_scaled, values))


def _fp8_scaled(scale: Tensor, x: Tensor) -> Tensor:
    scale = scale.to(x)
    return _fp8(x / scale) * scale


def _ggml(name: str, small: bool, x: Tensor) -> Tensor:
    """Round as llama.cpp: blocks of 32 along a head, which is rotated before by a Hadamard matrix (llama.cpp
    #21038) where it is whole 64s: of 64 for values (small), of the largest power of 2 that fits for keys.

    Queries are rotated, and outputs rotated back: that is rotating back what is read. Raises QuantkitError
    for heads that are not whole blocks, which llama.cpp refuses.
    """
    width = x.shape[-1]
    if width % BLOCK:
        raise QuantkitError(
            f"a head of {width} values is not a multiple of {BLOCK}",
            f"llama.cpp keeps no {name.lower()} cache of this model: choose fp8 or a float",
            UNSUPPORTED,
        )
    size = ROTATED if small else width & -width  # the largest power of 2 that divides it
    turn = sylvester(size, x.device) if width % ROTATED == 0 else None
    turned = x.float() if turn is None else _turn(x.float(), turn)
    grid, rows = ggml_grid(name), turned.reshape(-1, BLOCK)
    codes, params = grid.quantize(rows)
    read = grid.decode(codes, group(params, 0)).view(turned.shape)
    return (read if turn is None else _turn(read, turn)).to(x.dtype)


def _turn(x: Tensor, turn: Tensor) -> Tensor:
    """Multiply every `len(turn)` values of a head by a symmetric orthogonal matrix, its own inverse."""
    return (x.unflatten(-1, (-1, len(turn))) @ turn).flatten(-2)
