"""quantkit: compress causal language models and show honestly what it cost.

The functions of `quantkit.api` are here by name, and imported when they are used: see docs/python.md.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.2.0"
__all__ = [
    *("quantize", "evaluate", "inspect", "plan", "auto", "verify"),
    *("Evaluation", "Progress", "QuantkitError", "Result"),
]


class Room(ModuleType):
    """A package that is also called: `quantkit.quantize(…)` is `quantkit.api.quantize(…)`."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function(*arguments, **options)

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(self._function)

    @property
    def _function(self) -> Any:
        return getattr(import_module("quantkit.api"), self.__name__.rpartition(".")[2])


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("quantkit.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
