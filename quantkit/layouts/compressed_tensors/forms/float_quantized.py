"""float-quantized: 8-bit floats and, mostly, inputs rounded to such, too.

`weight` float8 e4m3 `[out, in]`; `weight_scale` bfloat16, `[out, 1]` per row or `[out / 128, in / 128]` per
block, rounded up; where scales of inputs are stored, `input_scale` bfloat16 `[1]`. Read besides: scales in
other precisions, per tensor or group. Format: compressed-tensors 0.20 `compressors/naive_quantized`,
`quantization/quant_scheme.py: FP8_DYNAMIC, FP8_BLOCK`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.layouts import LinearSpec, Table
from quantkit.layouts.compressed_tensors.forms import Form

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.grids.grid import QuantizedWeight
    from quantkit.layouts.compressed_tensors.schemes import Scheme
    from quantkit.layouts.compressed_tensors.stored import StoredWeight

NAME = "float-quantized"
SUFFIXES = ("weight", "weight_scale", "weight_g_idx", "input_scale")


@dataclass(frozen=True)
class FloatQuantized(Form):
    """block: rows and columns that share a scale; None for whole rows. static: inputs are scaled by what
    calibration text found, one number a linear; else each token, or its columns in a block, by itself."""

    block: int | None = None
    static: bool = False
    NAME = NAME
    common = ()
    uniform = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"peak"} if self.static else ())

    def holds(self, grid: object) -> bool:
        """Whether it is a grid of 8-bit floats, or one of 8 bits that has not been made yet."""
        return type(grid).__name__ in ("Float8Grid", "Width") and grid.bits == 8

    def check(self, spec: LinearSpec) -> str | None:
        """Every linear fits: the grid's group size has been checked."""
        return None

    def tensors(self, spec: LinearSpec) -> Table:
        """The two or three tensors of one linear."""
        rows, columns = (self.block, self.block) if self.block else (1, spec.in_features)
        scales = -(-spec.out_features // rows), -(-spec.in_features // columns)
        table: Table = {
            "weight": ("F8_E4M3", (spec.out_features, spec.in_features)),
            "weight_scale": ("BF16", scales),
        }
        return table | ({"input_scale": ("BF16", (1,))} if self.static else {})

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The two or three tensors of one linear."""
        from quantkit.grids.float8 import FLOAT8, LARGEST

        assert weight.column_group is None, "columns reordered across groups are not written"
        grid = weight.grid
        scale = weight.params.scale[:: grid.rows or None].to(grid.stored)
        tensors = {"weight": weight.codes.contiguous().view(FLOAT8), "weight_scale": scale.contiguous()}
        if self.static:
            tensors["input_scale"] = _input_scale(weight.input_peak, LARGEST)
        return tensors

    def weights(self, setting: tuple) -> dict:
        """`weights` of the config group."""
        return {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "block" if self.block else "channel",
            "group_size": None,
            "block_structure": [self.block, self.block] if self.block else None,
            "dynamic": False,
            "observer": "minmax",
        }

    def activations(self, setting: tuple) -> dict:
        """`input_activations` of the config group."""
        dynamic = "group" if self.block else "token"
        return {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor" if self.static else dynamic,
            "group_size": self.block if not self.static else None,
            "dynamic": not self.static,
            "observer": "minmax" if self.static else None,
        }


def _input_scale(peak: Tensor | None, most: float) -> Tensor:
    """As it is stored, `[1]`; that of inputs that were never anything but zero is any.

    Raises QuantkitError for a linear that no calibration text entered.
    """
    import torch

    if peak is None:
        raise QuantkitError(
            "static scales need inputs, and no calibration text enters one of these linears",
            "leave out --static, or --towers, or keep such linears in 16 bit with --exclude",
            UNSUPPORTED,
        )
    stored = (peak / most).to(torch.bfloat16).view(1)
    return torch.where(stored == 0, torch.finfo(torch.bfloat16).eps, stored)


def reads(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a linear is stored so."""
    import torch

    return "weight_packed" not in tensors and tensors["weight"].dtype == torch.float8_e4m3fn


def like(scheme: Scheme) -> FloatQuantized:
    """The form of such linears."""
    block, inputs = scheme.weights.block, scheme.activations
    return FloatQuantized(block and block[1], bool(inputs) and not inputs.dynamic)


def decode(stored: StoredWeight) -> QuantizedWeight:
    """Codes and parameters. Raises QuantkitError for parts that do not fit one another."""
    import torch

    from quantkit.grids.float8 import LARGEST, Float8Grid, Float8Params
    from quantkit.grids.grid import QuantizedWeight

    weight, numbers = stored.matrix(), stored.numbers
    if numbers and (numbers.kind, numbers.symmetric) != ("float", True):
        raise stored.broken("weight", f"is {weight.dtype}, not of symmetric {stored.called()}")
    scale, group_size = stored.scale(weight)
    column_group = stored.column_group(weight.shape[1], group_size, scale.shape[1])
    rows = stored.rows_of_scale(weight)
    precision = str(stored.tensors["weight_scale"].dtype).removeprefix("torch.")
    grid = Float8Grid(group_size, rows, scale_dtype=precision)
    peak = stored.number("input_scale")[0] * LARGEST if "input_scale" in stored.tensors else None
    return QuantizedWeight(grid, weight.view(torch.uint8), Float8Params(scale), column_group, peak)


CLIENTS: dict[str, list[dict]] = {
    "vLLM": [
        {"form": "float8", "experts": True, "loads": False, "note": "its CPU build has no kernel for it"},
        {"form": "float8", "not_group_size": [-1], "note": "its CPU build wants AMX for blocks"},
        {
            "form": "float8",
            "static": True,
            "loads": False,
            "note": "its CPU build takes inputs token by token, not by stored scales",
        },
        {
            "form": "float8",
            "cache": True,
            "loads": True,
            "note": "its CPU build cuts keys and values off towards zero",
        },
    ],
}
