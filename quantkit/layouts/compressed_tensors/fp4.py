"""What compressed-tensors' two forms of 4-bit floats have in common: two codes a byte, their config groups.

`weight_packed` uint8 `[out, in / 2]`: e2m1's bits, the first of two in the low ones. Inputs may be rounded to
the same kind of numbers as the model runs. Format: compressed-tensors 0.20 `compressors/nvfp4`, `mxfp4`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.layouts import LinearSpec, Table
from quantkit.layouts.compressed_tensors.forms import PACKAGE, Form

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.grids.grid import QuantizedWeight
    from quantkit.layouts.compressed_tensors.stored import StoredWeight

BITS = 4
PLAIN = {"loads": True, "note": "in bfloat16 or with dequantize=True", "needs": PACKAGE}
NO_KERNEL = {"loads": False, "note": "its CPU build has no kernel for it; on GPUs it was not tried"}


@dataclass(frozen=True)
class Fp4Form(Form):
    """quantize_inputs: the inputs of linears are rounded, too."""

    quantize_inputs: bool = False
    common = ()
    GROUP = 0
    SCALE = ""
    STRATEGY = ""
    SCALE_DTYPE = ""

    def check(self, spec: LinearSpec) -> str | None:
        """Rows are whole groups."""
        if spec.in_features % self.GROUP:
            return f"in_features {spec.in_features} is no multiple of {self.GROUP}, the groups of {self.NAME}"
        return None

    def tensors(self, spec: LinearSpec) -> Table:
        """Codes and scales."""
        rows, columns = spec.out_features, spec.in_features
        scales = self.SCALE, (rows, columns // self.GROUP)
        return {"weight_packed": ("U8", (rows, columns // 2)), "weight_scale": scales}

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Codes and scales."""
        assert weight.column_group is None, "columns reordered across groups are not written"
        return {"weight_packed": pack(weight.codes), "weight_scale": self.scales(weight.params.scale)}

    def scales(self, scale: Tensor) -> Tensor:
        """Scales float32 `[out, groups]` as they are stored, a byte each."""
        raise NotImplementedError

    def weights(self, setting: Any) -> dict[str, Any]:
        """`weights` of the config group."""
        return self._numbers() | {"dynamic": False, "observer": "minmax"}

    def activations(self, setting: Any) -> dict[str, Any] | None:
        """`input_activations` of it."""
        return self._numbers() | self._at_run_time() if self.quantize_inputs else None

    def _at_run_time(self) -> dict[str, Any]:
        return {"dynamic": True, "observer": None}

    def _numbers(self) -> dict[str, Any]:
        return {
            "num_bits": BITS,
            "type": "float",
            "symmetric": True,
            "strategy": self.STRATEGY,
            "group_size": self.GROUP,
            "scale_dtype": self.SCALE_DTYPE,
        }


def pack(codes: Tensor) -> Tensor:
    """Codes uint8 `[out, in]`, two to a byte, the first in the low bits."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Inverse of `pack`."""
    import torch

    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def is_packed(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a linear's codes are 4-bit floats, in bytes where integers lie in words."""
    import torch

    return "weight_packed" in tensors and tensors["weight_packed"].dtype == torch.uint8


def parts(stored: StoredWeight, group_size: int, scale_dtype: str) -> tuple[Tensor, Tensor]:
    """Codes uint8 `[out, in]`, and scales as they are stored. Raises QuantkitError where they do not fit."""
    packed, scale, numbers = stored.tensors["weight_packed"], stored.tensors["weight_scale"], stored.numbers
    said = numbers is None or (numbers.kind, numbers.bits, numbers.group_size) == ("float", BITS, group_size)
    if packed.ndim != 2 or not packed.numel() or not said:
        told = f"{stored.called()} in groups of {numbers.group_size}" if numbers else "a matrix"
        raise stored.broken("weight_packed", f"is {packed.dtype} {list(packed.shape)}, not {told}")
    rows, in_features = packed.shape[0], 2 * packed.shape[1]
    expected = rows, in_features // group_size
    if in_features % group_size or tuple(scale.shape) != expected or str(scale.dtype) != scale_dtype:
        raise stored.broken(
            "weight_scale",
            f"is {scale.dtype} {list(scale.shape)} instead of {scale_dtype} {list(expected)} for "
            f"{rows} × {in_features} weights",
        )
    return unpack(packed), scale
