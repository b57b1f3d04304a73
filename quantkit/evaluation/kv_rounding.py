"""Rounding of quantized KV caches, as engines compute it.

All functions take and return `[batch, heads, tokens, head_dim]` in the model's dtype, as caches of
transformers do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError, require
from quantkit.grids.ggml import named as ggml_grid
from quantkit.grids.grid import group
from quantkit.models.kv_types import BLOCK, TYPES

ROTATED = 64  # smallest rotation in llama.cpp


@dataclass(frozen=True)
class KvRounding:
    """The functions that round keys and values. A token's own query also sees the rounded values."""

    keys: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]


def named(name: str) -> KvRounding:
    """Return the rounding for a name of `kv_types.TYPES`. Raises QuantkitError for transformers' quantized
    caches, which do not round the last 128 tokens."""
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
    """Round as vLLM's `fp8`: to e4m3 with scale 1; values out of range become the largest."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-most, most).to(torch.float8_e4m3fn).to(x.dtype)


def scaled(keys: Tensor, values: Tensor) -> KvRounding:
    """Return the rounding `fp8` with calibrated scales, one number each (stored `k_scale`, `v_scale`)."""
    return KvRounding(partial(_fp8_scaled, keys), partial(_fp8_scaled, values))


def _fp8_scaled(scale: Tensor, x: Tensor) -> Tensor:
    scale = scale.to(x)
    return _fp8(x / scale) * scale


def _ggml(name: str, small: bool, x: Tensor) -> Tensor:
    """Round as llama.cpp: in ggml blocks of 32 values along a head. If the head's width is a multiple of 64,
    a Hadamard matrix first rotates each head (llama.cpp #21038). The matrix has size 64 for values (`small`).
    For keys its size is the largest power of 2 that divides the width.

    The rounded values are rotated back, which equals llama.cpp's rotation of queries and outputs. Raises
    QuantkitError if the width is not a multiple of 32, which llama.cpp rejects.
    """
    width = x.shape[-1]
    hint = f"llama.cpp keeps no {name.lower()} cache of this model: choose fp8 or a float"
    require(width % BLOCK == 0, f"a head of {width} values is not a multiple of {BLOCK}", hint, UNSUPPORTED)
    size = ROTATED if small else width & -width  # the largest power of 2 that divides it
    turn = sylvester(size, x.device) if width % ROTATED == 0 else None
    turned = x.float() if turn is None else _turn(x.float(), turn)
    grid, rows = ggml_grid(name), turned.reshape(-1, BLOCK)
    codes, params = grid.quantize(rows)
    read = grid.decode(codes, group(params, 0)).view(turned.shape)
    return (read if turn is None else _turn(read, turn)).to(x.dtype)


def sylvester(size: int, device: torch.device | None = None) -> Tensor:
    """Return Sylvester's orthonormal matrix `[size, size]`, float32, its own inverse; size: a power of 2."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def _turn(x: Tensor, turn: Tensor) -> Tensor:
    """Multiply each `len(turn)` values of a head by the matrix `turn`, which is its own inverse."""
    return (x.unflatten(-1, (-1, len(turn))) @ turn).flatten(-2)
