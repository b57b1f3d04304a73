"""Modules that are imported when one of their names is first used: plans and inspections do without torch."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _Late(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


if TYPE_CHECKING:  # what editors and type checkers read
    import gguf
    import torch

    from quantkit.grids import affine, biased, float8, fp4, ggml, int8, levels, nf4
    from quantkit.grids import grid as grids
else:
    torch, gguf = _Late("torch"), _Late("gguf")
    grids, ggml = _Late("quantkit.grids.grid"), _Late("quantkit.grids.ggml")
    affine, biased, float8 = (_Late(f"quantkit.grids.{name}") for name in ("affine", "biased", "float8"))
    fp4, int8, levels, nf4 = (_Late(f"quantkit.grids.{name}") for name in ("fp4", "int8", "levels", "nf4"))
activations = _Late("quantkit.layouts.compressed_tensors.activations")
blocks = _Late("quantkit.layouts.ggml.blocks")
