"""A layout of ternary weights: `X.trits` uint8 `[out, in / 4]`, four codes a byte, `X.trit_scale` float16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.layouts import Layout, LinearSpec, Table, Width, spec_of_shape

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.grids.grid import QuantizedWeight

NAME = "trits"


@dataclass(frozen=True)
class TritsLayout(Layout):
    group_size: int = 32
    marker = code_part = "trits"
    label = "trit"
    suffixes = ("trits", "trit_scale")

    def check(self, spec: LinearSpec) -> str | None:
        return None if spec.grid.bits == 2 else "trits holds ternary weights alone"

    def tensors(self, spec: LinearSpec) -> Table:
        rows, columns = spec.out_features, spec.in_features
        return {
            "trits": ("U8", (rows, columns // 4)),
            "trit_scale": ("F16", (rows, columns // self.group_size)),
        }

    def sizes(self, parts: Mapping[str, Tensor]) -> LinearSpec:
        rows, columns = parts["trits"].shape
        return spec_of_shape(rows, 4 * columns, Width(2, self.group_size))

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        parts = weight.codes.view(len(weight.codes), -1, 4).unbind(2)
        packed = parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6
        return {"trits": packed, "trit_scale": weight.params.scale.half()}

    def decode(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        import torch
        from quantkit.grids.ternary import TernaryGrid, TernaryParams

        from quantkit.grids.grid import QuantizedWeight

        packed = tensors["trits"]
        codes = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)
        return QuantizedWeight(
            TernaryGrid(self.group_size), codes, TernaryParams(tensors["trit_scale"].float())
        )

    def config(self, specs: Sequence[LinearSpec], beside: Sequence[str] = ()) -> dict:
        return {"quant_method": NAME, "group_size": self.group_size}


def detect(config: dict) -> TritsLayout | None:
    return TritsLayout(config["group_size"]) if config.get("quant_method") == NAME else None
