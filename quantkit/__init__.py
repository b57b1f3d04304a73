"""quantkit: compress causal language models and show honestly what it cost. Functions: docs/python.md."""

from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.3.0"
__all__ = "Evaluation Progress QuantkitError auto convert evaluate inspect plan push quantize verify".split()


class Room(ModuleType):
    """A package that can be called: `quantkit.quantize(…)` is `quantkit.api.quantize(…)`."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(import_module("quantkit.api"), self.__name__.rpartition(".")[2])(*arguments, **options)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("quantkit.api"), name)
