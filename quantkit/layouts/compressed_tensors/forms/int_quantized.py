"""int-quantized: integers, a byte each, and mostly inputs rounded to such, token by token.

`weight` int8 `[out, in]`; `weight_scale` float16 `[out, 1]`. Read besides: fewer bits; scales in other
precisions, per tensor, group or block; zero points. Format: compressed-tensors 0.20
`compressors/naive_quantized`, `quantization/quant_scheme.py: INT8_W8A8`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.layouts import LinearSpec, Table
from quantkit.layouts.compressed_tensors.forms import DECODED, Form

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.grids.grid import QuantizedWeight
    from quantkit.layouts.compressed_tensors.stored import StoredWeight

NAME = "int-quantized"
SUFFIXES = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point")
HALF = 128  # codes are stored without a sign in memory, with one on disk


@dataclass(frozen=True)
class IntQuantized(Form):
    """Symmetric, 8 bits, a scale for each row; each token of the inputs is scaled by itself."""

    NAME = NAME
    common = ()
    uniform = True

    def holds(self, grid: object) -> bool:
        """Whether it is a symmetric grid of 8 bits, which has to have whole rows: see `check`."""
        return type(grid).__name__ in ("AffineGrid", "Width") and grid.bits == 8 and grid.symmetric

    def check(self, spec: LinearSpec) -> str | None:
        """Rows must be whole."""
        whole = spec.grid.group_size == spec.in_features
        return None if whole else "int8 engines take one scale for each row: leave out the group size"

    def tensors(self, spec: LinearSpec) -> Table:
        """Both tensors of one linear."""
        shape = spec.out_features, spec.in_features
        return {"weight": ("I8", shape), "weight_scale": ("F16", (shape[0], 1))}

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The two tensors of one linear."""
        import torch

        assert weight.column_group is None, "columns reordered across groups are not written"
        return {
            "weight": (weight.codes ^ HALF).view(torch.int8).contiguous(),
            "weight_scale": weight.params.scale.half().contiguous(),
        }

    def weights(self, setting: tuple) -> dict:
        """`weights` of the config group."""
        return {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "channel",
            "group_size": None,
            "dynamic": False,
            "observer": "minmax",
        }

    def activations(self, setting: tuple) -> dict:
        """`input_activations` of the config group."""
        return {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "group_size": None,
            "dynamic": True,
            "observer": None,
        }


def reads(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a linear is stored so."""
    return "weight_packed" not in tensors and not _is_float8(tensors["weight"])


def _is_float8(weight: Tensor) -> bool:
    import torch

    return weight.dtype == torch.float8_e4m3fn


def decode(stored: StoredWeight) -> QuantizedWeight:
    """Codes and parameters. Raises QuantkitError for parts that do not fit one another."""
    import torch

    weight, numbers = stored.matrix(), stored.numbers
    bits = numbers.bits if numbers else 8
    half = 2 ** (bits - 1)
    low, high = (int(end) for end in weight.aminmax()) if weight.dtype == torch.int8 else (-1000, 1000)
    if low < -half or high >= half or (numbers and numbers.kind != "int"):
        raise stored.broken("weight", f"is {weight.dtype} from {low} to {high}, not of {stored.called()}")
    return stored.affine((weight.short() + half).to(torch.uint8), bits)


CLIENTS = {
    "transformers": [
        {"form": "int8", "activations": False, "experts": False, "mixed": False, "loads": True, **DECODED}
    ],
    "vLLM": [
        {"form": "int8", "experts": True, "loads": False, "note": "its CPU build has no kernel for it"},
        {"form": "int8", "activations": False, "loads": False, "note": "its CPU build has no kernel for it"},
    ],
}
