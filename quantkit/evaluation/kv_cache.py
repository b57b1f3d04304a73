"""A streamed model with a quantized KV cache: attention computes with rounded keys and values.

transformers' attention passes keys (after their rotary embedding) and values to a cache object and computes
with the returned tensors. The cache objects here return all keys and values of a window, rounded by
the functions at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import UNSUPPORTED, QuantkitError, require
from quantkit.grids.ggml import named as ggml_grid
from quantkit.grids.grid import group
from quantkit.layouts import Layout
from quantkit.models.kv_types import BLOCK, TYPES
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.caches import ModuleCache, parameter_of, with_cache

ROTATED = 64  # smallest rotation in llama.cpp


class KvCache:
    """The quantized cache of a model. name: a name of `kv_types.TYPES`. scales: {(block, name of the
    attention): (k_scale, v_scale)}, if stored in the checkpoint; only `fp8` uses them."""

    def __init__(self, name: str, scales: Mapping[tuple[int, str], tuple[Tensor, Tensor]]):
        self.name, self._scales = name, scales if name == "fp8" else {}
        self._rounding = rounding_of(name)
        self._modules: dict[int, list[_RoundingCache]] = {}  # by block

    def attach(self, index: int, block: nn.Module) -> None:
        """Make block `index` use this cache; do nothing if it does already."""
        if index in self._modules:
            return
        self._modules[index] = []
        for name, module in list(block.named_modules()):
            if parameter_of(module.forward):
                cache = _RoundingCache(self._rounding_of(index, name))
                module.forward = with_cache(module.forward, cache)
                self._modules[index].append(cache)

    def _rounding_of(self, index: int, attention: str) -> KvRounding:
        scales = self._scales.get((index, attention))
        return KvRounding(*(partial(_fp8_scaled, scale) for scale in scales)) if scales else self._rounding

    def describe(self, source: str) -> dict[str, Any]:
        """Return the cache after a run as JSON: its type, the engine that rounds so, bytes per value with
        scales, and how many of the model's blocks have a cache. Raises QuantkitError if none has."""
        layers = sum(any(module.used for module in modules) for modules in self._modules.values())
        what = f"{source} keeps no keys and values: there is nothing to quantize"
        require(layers, what, "leave out --kv-dtype", UNSUPPORTED)
        kind = TYPES[self.name]
        blocks, size = len(self._modules), float(kind.nbytes)
        return {
            "dtype": self.name, "keeper": kind.keeper, "bytes_per_value": size, "layers": layers,
            "blocks": blocks,
        }  # fmt: skip


def stored_scales(skeleton: Skeleton) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """Return the calibrated scales stored in a checkpoint, as compressed-tensors and vLLM use them: {(block,
    name of the attention in the block): (k_scale, v_scale)}."""
    stored, checkpoint = {}, skeleton.checkpoint
    keys, values = (checkpoint.layout or Layout).cache_scales
    for index, block in enumerate(skeleton.names.stored_blocks):
        inside = (name.removesuffix(f".{keys}") for name in checkpoint.infos if name.endswith(f".{keys}"))
        for owner in inside:
            if owner.startswith(block) and f"{owner}.{values}" in checkpoint.infos:
                scales = (checkpoint.load(f"{owner}.{suffix}").float() for suffix in (keys, values))
                stored[index, owner.removeprefix(block)] = tuple(scales)
    return stored


class _RoundingCache(ModuleCache):
    """The cache that a module sees: empty before each window. used: whether it received keys and values."""

    def __init__(self, rounding: KvRounding):
        self._rounding, self.used = rounding, False

    def forget(self) -> None:
        """Not be used: recurrent layers and indexers are not quantized."""
        self.used = False

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values `[batch, heads, tokens, head_dim]` after rounding."""
        self.used = True
        return self._rounding.keys(keys), self._rounding.values(values)


# ---- rounding, as engines compute it: of `[batch, heads, tokens, head_dim]`, in the model's dtype


@dataclass(frozen=True)
class KvRounding:
    """The functions that round keys and values. A token's own query also sees the rounded values."""

    keys: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]


def rounding_of(name: str) -> KvRounding:
    """Return the rounding for a name of `kv_types.TYPES`. Raises QuantkitError for transformers' quantized
    caches, which do not round the last 128 tokens."""
    if TYPES[name].keeper.startswith("transformers"):
        hint = "choose q8_0 or q4_0 (llama.cpp), fp8 (vLLM) or a float"
        raise QuantkitError(f"--kv-dtype {name}: caches of transformers are not measured", hint, UNSUPPORTED)
    if name in ("float32", "bfloat16", "float16"):
        dtype = getattr(torch, name)
        return KvRounding(*[lambda x: x.to(dtype).to(x.dtype)] * 2)
    if name == "fp8":
        return KvRounding(_fp8, _fp8)
    grid = name.upper()
    return KvRounding(partial(_ggml, grid, False), partial(_ggml, grid, True))


def _fp8(x: Tensor) -> Tensor:
    """Round as vLLM's `fp8`: to e4m3 with scale 1; values out of range become the largest."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-most, most).to(torch.float8_e4m3fn).to(x.dtype)


def _fp8_scaled(scale: Tensor, x: Tensor) -> Tensor:
    """Round as `fp8` with a calibrated scale, one number (stored `k_scale` or `v_scale`)."""
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
