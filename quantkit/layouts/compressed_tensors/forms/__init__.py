"""Forms: how compressed-tensors lays a linear out, by the `format` of its config group. One file each.

A form's file holds NAME, as configurations spell it; SUFFIXES, the tensors of a linear that it may store;
`reads(tensors)`, whether stored tensors have it, and `decode(stored)`, what they say; CLIENTS, what each
client makes of it, before what is true of all forms (see inspection/clients.py); and, where it is written, a
class that is a `Form`, and `like(scheme)`, that of a stored scheme, so that it can be written again. torch is
imported where tensors are made.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Hashable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from quantkit.layouts import Table, refuse_incomplete

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.grids.grid import Grid, QuantizedWeight
    from quantkit.layouts import LinearSpec, Width

PACKAGE = ["compressed-tensors"]
DECODED = {"note": "with dequantize=True", "needs": PACKAGE, "option": "dequantize=True"}


class Form(Protocol):
    """What is written of a linear, and said of it. A frozen dataclass, with the options of its method.

    NAME: the `format` of a config group. common: the setting of most linears, which target `Linear`; a
    setting is what tells one config group of this form from another, such as bits and group size. uniform:
    there is no other, so that all that is written can be read by it. floats: of
    the suffixes, those that hold what is stored in floating point. needs: which statistics of a linear's
    inputs it writes something of (see SiteStatistics); `peak` comes as `QuantizedWeight.input_peak`.
    """

    NAME: str
    common: Hashable
    uniform = False
    floats: tuple[str, ...] = ("weight_scale",)
    needs: frozenset[str] = frozenset()
    no_experts: str | None = None  # why no client reads experts in it
    REQUIRED = ("check", "tensors", "encode", "weights")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_incomplete(cls, Form)

    def holds(self, grid: Grid | Width) -> bool:
        """Whether weights on this grid are written so: with several forms the first that says so counts."""
        return True

    def setting(self, spec: LinearSpec) -> Hashable:
        """That of one linear."""
        return self.common

    def check(self, spec: LinearSpec) -> str | None:
        """Why this form cannot hold `spec`, with the fix; None when it can."""

    def tensors(self, spec: LinearSpec) -> Table:
        """Return the tensors stored for one linear, by suffix."""

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Suffix -> tensor, as clients want it; inverse of its module's `decode`."""

    def weights(self, setting: Any) -> dict[str, Any]:
        """`weights` of the config group of a setting."""

    def activations(self, setting: Any) -> dict[str, Any] | None:
        """`input_activations` of it; None where inputs stay as they are."""
        return None


def modules() -> list[ModuleType]:
    """All of them, in alphabetical order."""
    return [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]


def suffixes() -> tuple[str, ...]:
    """Tensors that a linear of any form may have."""
    return tuple(dict.fromkeys(part for module in modules() for part in module.SUFFIXES))


def stored_as(tensors: Mapping[str, Tensor]) -> ModuleType:
    """The form of stored tensors."""
    return next(module for module in modules() if module.reads(tensors))


def rules(client: str) -> list[dict[str, Any]]:
    """What a client makes of each form."""
    return [rule for module in modules() for rule in module.CLIENTS.get(client, ())]
