"""The layout of GGUF files for llama.cpp and related engines. `blocks.py` packs ggml blocks bit by bit.

A staging folder stores a linear X as `X.ggml`, its bytes, and `X.ggml_type`, ggml's number of the type. NVFP4
adds `X.ggml_scale`, float32 `[1]`, by which the whole matrix is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.layouts import Layout, LinearSpec, Table, Tensors, damaged, spec_of_shape
from quantkit.layouts._late import blocks, ggml, gguf, grids, torch

NAME = "gguf"


@dataclass(frozen=True)
class GgmlLayout(Layout):
    """ggml blocks, byte for byte as in the GGUF file."""

    marker = code_part = label = "ggml"
    suffixes = ("ggml", "ggml_type", "ggml_scale")
    floats = ("ggml",)
    optional = ("ggml_type", "ggml_scale")
    outside = frozenset({"head", "embedding"})
    fused = False

    def check(self, spec: LinearSpec) -> str | None:
        if not isinstance(spec.grid, ggml.BlockGrid):
            return f"a GGUF file holds ggml's block types, not {spec.grid.describe()}"
        if spec.in_features % spec.grid.group_size:
            size = spec.grid.group_size
            return f"in_features {spec.in_features} is not a multiple of {spec.grid.name}'s {size}"
        return None

    def tensors(self, spec: LinearSpec) -> Table:
        nbytes = blocks.row_bytes(spec.grid.name, spec.in_features)
        table = {"ggml": ("U8", (spec.out_features, nbytes))}
        return table | ({"ggml_scale": ("F32", (1,))} if spec.grid.joint else {})

    def sizes(self, tensors: Tensors) -> LinearSpec:
        kind = gguf.GGMLQuantizationType(int(tensors["ggml_type"]))
        if kind.name not in ggml.TYPES:
            raise damaged(tensors, f"blocks of type {kind.name} are not supported")
        (rows, columns), (block, nbytes) = tensors["ggml"].shape, gguf.GGML_QUANT_SIZES[kind]
        if columns % nbytes:
            raise ValueError
        return spec_of_shape(rows, columns // nbytes * block, ggml.named(kind.name))

    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        number = torch.tensor(gguf.GGMLQuantizationType[weight.grid.name].value, dtype=torch.int32)
        tensors = {"ggml": blocks.pack(weight.grid, weight.codes, weight.params), "ggml_type": number}
        if hasattr(weight.params, "divisor"):
            tensors["ggml_scale"] = 1 / weight.params.divisor.flatten()[:1]
        return tensors

    def decode(self, tensors: Tensors) -> grids.QuantizedWeight:
        grid = self.checked_spec(tensors).grid
        return grids.QuantizedWeight(grid, *blocks.unpack(grid, tensors["ggml"], tensors.get("ggml_scale")))

    def config(self, specs: Sequence[LinearSpec], outside: Sequence[str] = ()) -> dict:
        """Return {}: a GGUF file stores the type of every tensor itself."""
        return {}


def detect(config: dict) -> None:
    """Return None: this layout exists only in staging folders."""
    return None
