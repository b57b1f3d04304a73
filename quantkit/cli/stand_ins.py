"""Stand-ins for modules that a library imports for what no command here does: real once they are used.

A stand-in has the names it was given and imports the real module when it is asked for any other, so what the
library makes of it later works as ever.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def standing_in(modules: Mapping[str, Mapping[str, Any]], staying: Collection[str] = ()) -> Iterator[None]:
    """Give those modules that nobody has imported yet these names, name -> object, and import none of them.

    Afterwards an import finds the real module again, unless it is one of those that are `staying`.
    """
    group: list[_Module] = []
    group += (_Module(name, names, group) for name, names in modules.items() if name not in sys.modules)
    sys.modules.update({stand_in.__name__: stand_in for stand_in in group})
    try:
        yield
    finally:
        _retire([stand_in for stand_in in group if stand_in.__name__ not in staying])


def deferred(module: str, *names: str) -> dict[str, Any]:
    """Names of a module that are imported when they are called, looked into or inherited from."""
    return {name: _Deferred(module, name) for name in names}


def _retire(group: Collection[_Module]) -> None:
    """Leave their places to the real modules, all at once: those import each other."""
    for stand_in in group:
        stand_in.names = {}
        if sys.modules.get(stand_in.__name__) is stand_in:
            del sys.modules[stand_in.__name__]


class _Module(ModuleType):
    """Has the given names until its group retires; every other one is the real module's.

    Is a package, for imports of what is inside, where its names are not deferred.
    """

    def __init__(self, name: str, names: Mapping[str, Any], group: list[_Module]) -> None:
        super().__init__(name)
        self.names, self.group = names, group
        self.is_package = not any(isinstance(value, _Deferred) for value in names.values())

    def __getattr__(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        if name.startswith("__") and (name != "__path__" or not self.is_package):
            raise AttributeError(name)  # what `import` and `inspect` ask of every module
        _retire(self.group)
        return getattr(importlib.import_module(self.__name__), name)


class _Deferred:
    """One name of a module. In an annotation (`Name | None`) it is not used, and nothing is imported."""

    def __init__(self, module: str, name: str) -> None:
        self._place = (module, name)

    def _real(self) -> Any:
        module, name = self._place
        stand_in = sys.modules.get(module)
        if isinstance(stand_in, _Module):
            _retire(stand_in.group)
        return getattr(importlib.import_module(module), name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._real()(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def __mro_entries__(self, bases: tuple) -> tuple:
        return (self._real(),)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._real())

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__
