"""Caches of keys and values in place of transformers' own: each module of a block gets one by itself."""

import inspect
from collections.abc import Callable
from typing import Any

# names of a forward function's parameter for the cache, in transformers' versions and remote code
PARAMETERS = ("cache", "past_key_values", "past_key_value", "layer_past")


def parameter_of(forward: Callable) -> str | None:
    """Return the name of a forward function's parameter for the cache; None if it takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in PARAMETERS if name in parameters), None)


class ModuleCache:
    """An empty cache that one module sees. Subclasses round or record what `update` gets."""

    def __getattr__(self, name: str) -> Any:
        raise _OtherCache(name)

    def get_seq_length(self, *args: Any) -> int:
        """Return 0: no tokens come before a sequence."""
        return 0

    def forget(self) -> None:
        """Forget keys and values: the module uses the cache for something else."""


class _OtherCache(AttributeError):
    """Raised if a module uses an attribute that a cache of keys and values does not have."""


def with_cache(forward: Callable[..., Any], cache: ModuleCache) -> Callable[..., Any]:
    """Return a forward function that passes the cache to one that takes a cache."""
    signature, parameter = inspect.signature(forward), parameter_of(forward)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments[parameter] = cache
        try:
            return forward(*bound.args, **bound.kwargs)
        except _OtherCache:  # recurrent layers and indexers
            cache.forget()
            bound.arguments[parameter] = None
            return forward(*bound.args, **bound.kwargs)

    return replaced
