"""pack-quantized: integers of 2 to 8 bits in 32-bit words; weights alone.

`weight_packed` int32 `[out, in * bits / 32]`, a little-endian bit stream of `q + 2^(bits-1)` along in;
`weight_scale` float16 `[out, groups]`; `weight_shape` int64 `[2]`; where zero points vary,
`weight_zero_point` int32 `[out * bits / 32, groups]`, the same stream along out. Read besides:
`weight_g_idx`. Format: compressed-tensors 0.20 `compressors/pack_quantized`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.layouts import LinearSpec, Table
from quantkit.layouts._headers import words
from quantkit.layouts._packing import WORD, no_whole_words, pack, unpack
from quantkit.layouts.compressed_tensors.forms import Form

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.grids.grid import QuantizedWeight
    from quantkit.layouts.compressed_tensors.stored import StoredWeight

NAME = "pack-quantized"
SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


@dataclass(frozen=True)
class PackQuantized(Form):
    """bits, group_size (-1: whole rows) and symmetric are what most linears have; those with other bits or
    groups become further config groups."""

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    NAME = NAME

    @property
    def common(self) -> tuple[int, int]:
        return self.bits, self.group_size

    def setting(self, spec: LinearSpec) -> tuple[int, int]:
        """Bits and group size as the configuration names them."""
        whole = spec.grid.group_size == spec.in_features and self.group_size == -1
        return spec.grid.bits, -1 if whole else spec.grid.group_size

    def check(self, spec: LinearSpec) -> str | None:
        """Rows must fill whole words, columns too where zeros are packed."""
        return no_whole_words(spec, "in_features", *([] if self.symmetric else ["out_features"]))

    def tensors(self, spec: LinearSpec) -> Table:
        """The three or four tensors of one linear."""
        rows, bits, groups = spec.out_features, spec.grid.bits, -(-spec.in_features // spec.grid.group_size)
        table: Table = {
            "weight_packed": ("I32", (rows, words(spec.in_features, bits))),
            "weight_scale": ("F16", (rows, groups)),
            "weight_shape": ("I64", (2,)),
        }
        return table | ({} if self.symmetric else {"weight_zero_point": ("I32", (words(rows, bits), groups))})

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The three or four tensors of one linear."""
        import torch

        assert weight.column_group is None, "columns reordered across groups are not written"
        bits = weight.grid.bits
        tensors = {
            "weight_packed": pack(weight.codes.t(), bits).t().contiguous(),
            "weight_scale": weight.params.scale.half().contiguous(),
            "weight_shape": torch.tensor(weight.codes.shape),
        }
        if not weight.grid.symmetric:
            tensors["weight_zero_point"] = pack(weight.params.zero, bits)
        return tensors

    def weights(self, setting: tuple[int, int]) -> dict:
        """`weights` of the config group of these bits and this group size."""
        bits, group_size = setting
        return {
            "num_bits": bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if group_size == -1 else "group",
            "group_size": None if group_size == -1 else group_size,
            "dynamic": False,
            "observer": "minmax",
        }


def reads(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a linear is stored so."""
    return "weight_packed" in tensors


def decode(stored: StoredWeight) -> QuantizedWeight:
    """Codes and parameters. Raises QuantkitError for parts that do not fit one another."""
    import torch

    packed, told, numbers = stored.tensors["weight_packed"], stored.tensors["weight_shape"], stored.numbers
    shape = told.flatten().tolist()
    if len(shape) != 2 or told.is_floating_point() or min(shape) < 1:
        raise stored.broken("weight_shape", f"is {shape}, no shape")
    out_features, in_features = shape
    words = packed.shape[1] if packed.ndim == 2 else 0
    bits = numbers.bits if numbers else words * WORD // in_features
    if (
        packed.dtype != torch.int32
        or tuple(packed.shape) != (out_features, -(-in_features * bits // WORD))
        or not 2 <= bits <= 8
        or (numbers and numbers.kind != "int")
    ):
        raise stored.broken(
            "weight_packed",
            f"is {packed.dtype} {list(packed.shape)}: no {stored.called() if numbers else 'codes'} "
            f"for weight_shape {shape}",
        )
    return stored.affine(unpack(packed.t(), bits, in_features).t().contiguous(), bits)


CLIENTS = {
    "transformers": [
        {
            "symmetric": False,
            "mixed": True,
            "form": NAME,
            "loads": False,
            "note": "it takes the first config group for all",
        },
        {"symmetric": False, "form": NAME, "loads": False, "note": "with dequantize=True it does"},
    ],
    "vLLM": [
        {
            "experts": True,
            "form": NAME,
            "group_size": [-1, 32],
            "loads": False,
            "note": "its CPU build takes experts in groups, of 64 or 128",
        },
        {"form": NAME, "not_bits": [4]},
        {"experts": True, "form": NAME, "loads": True, "note": "its CPU build wants AMX for experts"},
    ],
}
