"""A streamed model with a quantized KV cache: attention computes with rounded keys and values.

transformers' attention passes keys (after their rotary embedding) and values to a cache object and computes
with the returned tensors. The cache objects here return all keys and values of a window, rounded by
kv_rounding.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Kv:
    """The quantized cache of a result. dtype: a name of `kv_types.TYPES`. keeper: engine that rounds so.
    bytes_per_value: scales included. layers: number of the `blocks` blocks that have a cache."""

    dtype: str
    keeper: str
    bytes_per_value: float
    layers: int
    blocks: int


class KvCache:
    """The quantized cache of a model. name: a name of `kv_types.TYPES`. scales: {(block, name of the
    attention): (k_scale, v_scale)}, if stored in the checkpoint; only `fp8` uses them."""

    def __init__(self, name: str, scales: Mapping[tuple[int, str], tuple[Tensor, Tensor]] = EMPTY):
        self.name, self._scales = name, scales if name == "fp8" else EMPTY
        self._rounding = kv_rounding.named(name)
        self._modules: dict[int, list[_RoundedModule]] = {}  # by block

    def attach(self, index: int, block: nn.Module) -> None:
        """Make block `index` use this cache; do nothing if it does already."""
        if index not in self._modules:
            modules = [(*pair, name) for pair in block.named_modules() if (name := _parameter(pair[1]))]
            self._modules[index] = [
                _RoundedModule(module, name, self._rounding_of(index, attention))
                for attention, module, name in modules
            ]

    def _rounding_of(self, index: int, attention: str) -> KvRounding:
        scales = self._scales.get((index, attention))
        return kv_rounding.scaled(*scales) if scales else self._rounding

    def describe(self, source: str) -> Kv:
        """Describe the cache after a run. Raises QuantkitError for a model without keys and values."""
        layers = sum(any(module.used for module in modules) for modules in self._modules.values())
        what = f"{source} keeps no keys and values: there is nothing to quantize"
        require(layers, what, "leave out --kv-dtype", UNSUPPORTED)
        kind = kv_types.TYPES[self.name]
        return Kv(self.name, kind.keeper, float(kind.nbytes), layers, len(self._modules))


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


def _parameter(module: nn.Module) -> str | None:
    """Return the name of the parameter of `module.forward` that takes the cache, or None."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in PARAMETERS if name in names), None)


class _RoundedModule:
    """Replaces the forward of a module that takes a cache, and gives it a rounding one. used: whether the
    module passed keys and values to the cache."""

    def __init__(self, module: nn.Module, parameter: str, rounding: KvRounding):
        self.used, self._parameter, self._rounding = False, parameter, rounding
        self._forward: Callable[..., Any] = module.forward
        self._signature = inspect.signature(module.forward)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reading = _Reading(self._rounding)
        bound = self._signature.bind(*args, **kwargs)
        bound.arguments[self._parameter] = reading
        try:
            out = self._forward(*bound.args, **bound.kwargs)
        except _OtherCache:  # recurrent layers and indexers are not quantized
            bound.arguments[self._parameter] = None
            return self._forward(*bound.args, **bound.kwargs)
        self.used = self.used or reading.used
        return out


class _OtherCache(AttributeError):
    """Raised if a module uses an attribute that a cache of keys and values does not have."""


class _Reading:
    """The cache for one call of one module. used: whether it received keys and values."""

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
