"""Layouts: how one quantized linear lies on disk for a named client. One file each, found by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from quantkit.errors import UNSUPPORTED, QuantkitError

if TYPE_CHECKING:
    import torch

    from quantkit.grids import QuantizedWeight
    from quantkit.spec import LinearSpec


class Layout(Protocol):
    """What a client expects. `encode` and `decode` are exact inverses."""

    suffixes: frozenset[str]

    def check(self, spec: LinearSpec) -> str | None:
        """Why this layout cannot hold `spec`, with the fix; None when it can."""

    def nbytes(self, spec: LinearSpec) -> int:
        """Bytes that one quantized linear takes on disk."""

    def encode(self, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        """Suffix -> tensor, as the client wants it."""

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """The weight that the stored tensors hold."""

    def config(self, specs: Sequence[LinearSpec]) -> dict:
        """`quantization_config` of config.json."""

    def files(self, specs: Sequence[LinearSpec]) -> dict[str, dict]:
        """Further JSON files that clients look for, by file name."""


def available() -> list[str]:
    """Names of the layouts, from the files of this package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def detect(config: dict, names: Iterable[str]) -> Layout | None:
    """The layout of a stored checkpoint; None when it is a plain one.

    Raises QuantkitError (exit code 4) for a quantization that no layout here understands.
    """
    stored = config.get("quantization_config")
    if stored is None:
        return None
    if not isinstance(stored, dict):
        stored = {"quant_method": stored}
    for name in available():
        layout = importlib.import_module(f"{__name__}.{name}").detect(stored)
        if layout is not None:
            return layout
    raise QuantkitError(
        f"quantization {stored.get('quant_method', stored)!r} is not understood",
        hint=f"quantkit reads: {', '.join(available())}",
        exit_code=UNSUPPORTED,
    )


def group_by_linear(layout: Layout | None, names: Iterable[str]) -> dict[str, list[str]]:
    """Stored names of each packed linear: `{"model.layers.0.mlp.up_proj": [".qweight", ...]}`."""
    groups: dict[str, list[str]] = {}
    if layout is None:
        return groups
    for name in names:
        linear, _, suffix = name.rpartition(".")
        if suffix in layout.suffixes:
            groups.setdefault(linear, []).append(name)
    return groups
