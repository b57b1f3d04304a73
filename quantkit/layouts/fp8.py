"""The layout of DeepSeek-V3 and of what transformers calls finegrained fp8: blocks of 8-bit floats.

`weight` float8 e4m3 `[out, in]`; `weight_scale_inv` float32 `[out / 128, in / 128]`, rounded up: what a
block's floats are to be *multiplied* with, whatever its name says. Inputs are rounded to e4m3, too: each
token by groups of 128 columns, in float32. Read besides: scales in E8M0. Format: DeepSeek-V3
`inference/kernel.py`; transformers 5.23 `integrations/finegrained_fp8.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.layouts import Layout, LinearSpec, Table, Width, sized
from quantkit.layouts._packing import column_groups

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quantkit.grids.grid import QuantizedWeight

NAME = "fp8"


@dataclass(frozen=True)
class Fp8Layout(Layout):
    """block: rows and columns that share a scale."""

    block: tuple[int, int] = (128, 128)
    marker = "weight_scale_inv"
    label = "float8"
    suffixes = ("weight", "weight_scale_inv")
    floats = ("weight_scale_inv",)
    rounds_inputs = True

    def check(self, spec: LinearSpec) -> str | None:
        """Whole blocks: of what is left over transformers makes smaller ones, without a word."""
        if spec.conv1d:
            return "its clients replace nn.Linear, not Conv1D"
        if spec.out_features % self.block[0]:
            return f"out_features {spec.out_features} is no multiple of {self.block[0]}"
        return None

    def tensors(self, spec: LinearSpec) -> Table:
        """The two tensors of one linear."""
        shape = spec.out_features, spec.in_features
        blocks = tuple(-(-size // side) for size, side in zip(shape, self.block, strict=True))
        return {"weight": ("F8_E4M3", shape), "weight_scale_inv": ("F32", blocks)}

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The two tensors of one linear."""
        from quantkit.grids.float8 import FLOAT8

        assert weight.column_group is None, "columns reordered across groups are not written"
        scale = weight.params.scale[:: weight.grid.rows].to(weight.grid.stored)
        return {
            "weight": weight.codes.contiguous().view(FLOAT8),
            "weight_scale_inv": scale.contiguous(),
        }

    def sizes(self, parts: Mapping[str, Any]) -> LinearSpec:
        """Those of the weight."""
        rows, columns = parts["weight"].shape
        return sized(rows, columns, Width(8, min(self.block[1], columns)))

    def decode(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """Exact inverse of `encode`. Raises QuantkitError for tensors that do not fit one another."""
        import torch

        from quantkit.grids.float8 import Float8Grid, Float8Params
        from quantkit.grids.grid import QuantizedWeight

        spec = self.believed(tensors)
        weight, stored, rows = tensors["weight"], tensors["weight_scale_inv"], self.block[0]
        scale = stored.float().repeat_interleave(rows, 0)[: len(weight)]
        group = column_groups(tensors, "weight", None, spec, weight.device)
        grid = Float8Grid(spec.grid.group_size, rows, scale_dtype=str(stored.dtype).removeprefix("torch."))
        return QuantizedWeight(grid, weight.view(torch.uint8), Float8Params(scale), group)

    def module(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, values: Tensor | None = None,
        products: bool = False,
    ) -> nn.Module:  # fmt: skip
        """A linear that rounds its inputs to e4m3 as it runs."""
        from quantkit.layouts.compressed_tensors.activations import QuantizedInputLinear
        from quantkit.layouts.compressed_tensors.forms import Numbers

        weight = self.values(tensors) if values is None else values
        size = math.gcd(self.block[1], weight.shape[1])
        numbers = Numbers(8, "float", True, "group", group_size=size, dynamic=True)
        return QuantizedInputLinear(weight, bias, numbers, exact=True)

    def config(self, specs: Sequence[LinearSpec], beside: Sequence[str] = ()) -> dict:
        """`quantization_config`."""
        kept = [name for spec in specs if spec.grid is None for name in spec.spellings]
        return {
            "quant_method": NAME,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block),
            "modules_to_not_convert": ["lm_head", *beside, *kept],
        }


def detect(config: dict) -> Fp8Layout | None:
    """The layout that a stored `quantization_config` describes, if it is this one."""
    if config.get("quant_method") != NAME:
        return None
    block, scheme = config.get("weight_block_size"), config.get("activation_scheme", "dynamic")
    experts = config.get("expert_dtype", "fp8")
    square = isinstance(block, list) and len(block) == 2 and all(type(s) is int and s > 0 for s in block)
    if not square or (scheme, experts) != ("dynamic", "fp8"):
        raise QuantkitError(
            f"quantization 'fp8' with weight_block_size {block!r}, activation_scheme {scheme!r} and "
            f"expert_dtype {experts!r} is not understood",
            hint="quantkit reads fp8 in blocks with dynamic activations, as DeepSeek publishes it, and "
            "compressed-tensors'",
            exit_code=UNSUPPORTED,
        )
    return Fp8Layout(tuple(block))
