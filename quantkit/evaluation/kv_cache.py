"""A streamed model with a quantized KV cache: attention computes with rounded keys and values.

transformers' attention passes keys (after their rotary embedding) and values to a cache object and computes
with the returned tensors. The cache objects here return all keys and values of a window, rounded by
kv_rounding.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from quantkit.errors import UNSUPPORTED, require
from quantkit.evaluation import kv_rounding
from quantkit.evaluation.kv_rounding import KvRounding
from quantkit.layouts import Layout
from quantkit.models import kv_types
from quantkit.models.skeleton import Skeleton

EMPTY: Mapping = MappingProxyType({})
PARAMETERS = ("past_key_values", "past_key_value", "layer_past")  # names of forward's parameter for the cache


class KvCache:
    """The quantized cache of a model. name: a name of `kv_types.TYPES`. scales: {(block, name of the
    attention): (k_scale, v_scale)}, if stored in the checkpoint; only `fp8` uses them."""

    def __init__(self, name: str, scales: Mapping[tuple[int, str], tuple[Tensor, Tensor]] = EMPTY):
        self.name, self._scales = name, scales if name == "fp8" else EMPTY
        self._rounding = kv_rounding.named(name)
        self._modules: dict[int, list[_ModuleCache]] = {}  # by block

    def attach(self, index: int, block: nn.Module) -> None:
        """Make block `index` use this cache; do nothing if it does already."""
        if index in self._modules:
            return
        self._modules[index] = []
        for name, module in list(block.named_modules()):
            parameters = inspect.signature(module.forward).parameters
            if parameter := next((word for word in PARAMETERS if word in parameters), None):
                cache = _ModuleCache(self._rounding_of(index, name))
                module.forward = _with_cache(module.forward, parameter, cache)
                self._modules[index].append(cache)

    def _rounding_of(self, index: int, attention: str) -> KvRounding:
        scales = self._scales.get((index, attention))
        return kv_rounding.scaled(*scales) if scales else self._rounding

    def describe(self, source: str) -> dict[str, Any]:
        """Return the cache after a run as JSON: its type, the engine that rounds so, bytes per value with
        scales, and how many of the model's blocks have a cache. Raises QuantkitError if none has."""
        layers = sum(any(module.used for module in modules) for modules in self._modules.values())
        what = f"{source} keeps no keys and values: there is nothing to quantize"
        require(layers, what, "leave out --kv-dtype", UNSUPPORTED)
        kind = kv_types.TYPES[self.name]
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


class _OtherCache(AttributeError):
    """Raised if a module uses an attribute that a cache of keys and values does not have."""


class _ModuleCache:
    """The cache that a module sees: empty before each window. used: whether it received keys and values."""

    def __init__(self, rounding: KvRounding):
        self._rounding, self.used = rounding, False

    def __getattr__(self, name: str) -> Any:
        raise _OtherCache(name)

    def get_seq_length(self, *args: Any) -> int:
        """Return 0: each window begins with an empty cache."""
        return 0

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values `[batch, heads, tokens, head_dim]` after rounding."""
        self.used = True
        return self._rounding.keys(keys), self._rounding.values(values)


def _with_cache(forward: Callable[..., Any], parameter: str, cache: _ModuleCache) -> Callable[..., Any]:
    """Return a forward function that passes the cache as `parameter`."""
    signature = inspect.signature(forward)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments[parameter] = cache
        try:
            return forward(*bound.args, **bound.kwargs)
        except _OtherCache:  # recurrent layers and indexers are not quantized
            cache.used = False
            bound.arguments[parameter] = None
            return forward(*bound.args, **bound.kwargs)

    return replaced
