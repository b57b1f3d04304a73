"""A streamed model with a quantized key/value cache: attention reads the values of an engine's cache.

transformers' attention hands keys, after their rotary embedding, and values to a cache and computes with
the returned values. The cache here returns all of a window at once, rounded as the engine that has the
type rounds (kv_rounding.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.evaluation import kv_rounding
from quantkit.evaluation.kv_rounding import KvRounding
from quantkit.models import kv_types
from quantkit.models.skeleton import Skeleton

EMPTY: Mapping = MappingProxyType({})
PARAMETERS = ("past_key_values", "past_key_value", "layer_past")  # names of caches in forwards


@dataclass(frozen=True)
class Kv:
    """The cache of a result. dtype: a name of `kv_types.TYPES`; keeper: the engine whose rounding it
    is; bytes_per_value with scales; layers: blocks that have a cache, of `blocks`."""

    dtype: str
    keeper: str
    bytes_per_value: float
    layers: int
    blocks: int


class KvCache:
    """The quantized cache of a running model. name: of `kv_types.TYPES`. scales: `k_scale` and `v_scale`
    of attention by its block and name there, where the checkpoint has such; `fp8` is by these."""

    def __init__(self, name: str, scales: Mapping[tuple[int, str], tuple[Tensor, Tensor]] = EMPTY):
        self.name, self._scales = name, scales if name == "fp8" else EMPTY
        self._rounding = kv_rounding.named(name)
        self._places: dict[int, list[_Place]] = {}  # by block

    def attach(self, index: int, block: nn.Module) -> None:
        """Give block `index` this cache, once."""
        if index not in self._places:
            found = [(*pair, name) for pair in block.named_modules() if (name := _parameter(pair[1]))]
            self._places[index] = [
                _Place(module, name, self._rounding_of(index, place)) for place, module, name in found
            ]

    def _rounding_of(self, index: int, place: str) -> KvRounding:
        scales = self._scales.get((index, place))
        return kv_rounding.scaled(*scales) if scales else self._rounding

    def describe(self, source: str) -> Kv:
        """Return the cache in use. Raises QuantkitError for a model without keys and values."""
        layers = sum(any(place.used for place in places) for places in self._places.values())
        if not layers:
            raise QuantkitError(
                f"{source} keeps no keys and values: there is nothing to quantize",
                "leave out --kv-dtype",
                UNSUPPORTED,
            )
        kind = kv_types.TYPES[self.name]
        return Kv(self.name, kind.keeper, float(kind.nbytes), layers, len(self._places))


def stored_scales(skeleton: Skeleton) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """Return the calibrated scales of a checkpoint's cache, by block and name of attention in the block, as
    compressed-tensors and vLLM use them."""
    found, checkpoint = {}, skeleton.checkpoint
    for index, block in enumerate(skeleton.names.stored_blocks):
        inside = (name.removesuffix(".k_scale") for name in checkpoint.infos if name.endswith(".k_scale"))
        for owner in inside:
            if owner.startswith(block) and f"{owner}.v_scale" in checkpoint.infos:
                scales = (checkpoint.load(f"{owner}.{part}").float() for part in ("k_scale", "v_scale"))
                found[index, owner.removeprefix(block)] = tuple(scales)
    return found


def _parameter(module: nn.Module) -> str | None:
    """Return the name of a forward's parameter that is a cache."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in PARAMETERS if name in names), None)


class _Place:
    """A module with a cache, its forward replaced; a cache passed on to modules inside is replaced
    there. used: whether it handed keys and values to it."""

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
        except _OtherCache:  # of a recurrent layer or an indexer, which are not quantized
            bound.arguments[self._parameter] = None
            return self._forward(*bound.args, **bound.kwargs)
        self.used = self.used or reading.used
        return out


class _OtherCache(AttributeError):
    """The error of a module that uses an attribute which no cache of keys and values has."""


class _Reading:
    """The cache of one call of one module. used: whether keys and values have come."""

    def __init__(self, rounding: KvRounding):
        self._rounding, self.used = rounding, False

    def __getattr__(self, name: str) -> Any:
        raise _OtherCache(name)

    def get_seq_length(self, *args: Any) -> int:
        """Return 0: each window begins with an empty cache."""
        return 0

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values `[batch, heads, tokens, head_dim]` as rounded in the cache."""
        self.used = True
        return self._rounding.keys(keys), self._rounding.values(values)
