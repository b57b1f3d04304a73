"""The layout of DeepSeek-V3, "finegrained fp8" in transformers: squares of 8-bit floats share a scale.

`weight` float8 e4m3 `[out, in]`; `weight_scale_inv` float32 `[out / 128, in / 128]`, sizes rounded up.
Despite its name, a square is *multiplied* with its scale. Inputs are also rounded to e4m3, in float32, with
one scale per token and 128 columns. Scales in E8M0 can be read, but are not written. Format: DeepSeek-V3
`inference/kernel.py`; transformers 5.23 `integrations/finegrained_fp8.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.layouts import Layout, LinearSpec, Table
from quantkit.layouts.compressed_tensors.floats import FloatQuantized

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quantkit.grids.grid import QuantizedWeight

NAME = "fp8"


@dataclass(frozen=True)
class Fp8Layout(Layout):
    """block: rows and columns that share a scale."""

    block: int = 128
    marker = "weight_scale_inv"
    label = "float8"
    suffixes = ("weight", "weight_scale_inv")
    floats = ("weight_scale_inv",)
    rounds_inputs = True

    def check(self, spec: LinearSpec) -> str | None:
        """Return why a linear does not fit; None if it does. transformers misreads partial blocks."""
        if spec.conv1d:
            return "its clients replace nn.Linear, not Conv1D"
        if spec.out_features % self.block:
            return f"out_features {spec.out_features} is not a multiple of {self.block}"
        return None

    def tensors(self, spec: LinearSpec) -> Table:
        """Return the two tensors of one linear."""
        table = FloatQuantized(self.block).tensors(spec)
        return {"weight": table["weight"], "weight_scale_inv": ("F32", table["weight_scale"][1])}

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Return the two tensors of one linear."""
        assert weight.column_group is None, "columns reordered across groups are not written"
        tensors = FloatQuantized(self.block).encode(weight)
        return {"weight": tensors["weight"], "weight_scale_inv": tensors["weight_scale"]}

    def sizes(self, parts: Mapping[str, Any]) -> LinearSpec:
        """Return the shape and the group size: the columns that share a scale."""
        return FloatQuantized(self.block).sizes(parts)

    def decode(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """Invert `encode` exactly. Raises QuantkitError if the tensors do not fit each other."""
        spec = self.checked_spec(tensors)
        parts = {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}
        return FloatQuantized(self.block).decode(parts, spec)

    def module(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, values: Tensor | None = None,
        products: bool = False,
    ) -> nn.Module:  # fmt: skip
        """Return a linear that rounds its inputs to e4m3."""
        from quantkit.layouts.compressed_tensors.activations import QuantizedInputLinear
        from quantkit.layouts.compressed_tensors.forms import Numbers

        weight = self.values(tensors) if values is None else values
        size = math.gcd(self.block, weight.shape[1])
        numbers = Numbers(8, "float", True, "group", group_size=size, dynamic=True)
        return QuantizedInputLinear(weight, bias, numbers, exact=True)

    def config(self, specs: Sequence[LinearSpec], outside: Sequence[str] = ()) -> dict:
        """Return `quantization_config`."""
        kept = [name for spec in specs if spec.grid is None for name in spec.spellings]
        return {
            "quant_method": NAME,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.block, self.block],
            "modules_to_not_convert": ["lm_head", *outside, *kept],
        }


def detect(config: dict) -> Fp8Layout | None:
    """Return the fp8 layout that a stored `quantization_config` describes; None for other layouts."""
    if config.get("quant_method") != NAME:
        return None
    block, scheme = config.get("weight_block_size"), config.get("activation_scheme", "dynamic")
    experts = config.get("expert_dtype", "fp8")
    square = isinstance(block, list) and len(block) == 2 and type(block[0]) is int and block[0] > 0
    if not square or block[0] != block[1] or (scheme, experts) != ("dynamic", "fp8"):
        raise QuantkitError(
            f"quantization 'fp8' with weight_block_size {block!r}, activation_scheme {scheme!r} and "
            f"expert_dtype {experts!r} is not supported",
            hint="quantkit reads square blocks with dynamic activations, as DeepSeek publishes them",
            exit_code=UNSUPPORTED,
        )
    return Fp8Layout(block[0])
