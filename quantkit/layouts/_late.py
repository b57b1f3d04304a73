"""Modules that are imported when one of their names is first used: plans and inspections do without torch."""

import importlib
from types import ModuleType
from typing import Any


class _Late(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


torch, gguf = _Late("torch"), _Late("gguf")
grids = _Late("quantkit.grids.grid")
affine, biased, float8, fp4, int8, levels, nf4 = (
    _Late(f"quantkit.grids.{name}") for name in ("affine", "biased", "float8", "fp4", "int8", "levels", "nf4")
)
activations = _Late("quantkit.layouts.compressed_tensors.activations")
ggml, blocks = _Late("quantkit.grids.ggml"), _Late("quantkit.layouts.ggml.blocks")
