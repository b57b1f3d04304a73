"""One linear's stored tensors, believed only as far as their types and sizes agree."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.grids.affine import AffineGrid, AffineParams
from quantkit.grids.grid import QuantizedWeight
from quantkit.layouts import of_linear
from quantkit.layouts._packing import WORD, unpack
from quantkit.layouts.compressed_tensors import forms
from quantkit.layouts.compressed_tensors.schemes import Numbers

SCALES = (torch.float16, torch.bfloat16, torch.float32)


class StoredWeight:
    """numbers: what the configuration says of the weight; None reads it off the shapes."""

    def __init__(self, tensors: Mapping[str, Tensor], numbers: Numbers | None):
        self.tensors = tensors
        self.numbers = numbers

    def broken(self, part: str, why: str) -> QuantkitError:
        """The error of a tensor that does not fit."""
        return QuantkitError(
            f"{part}{of_linear(self.tensors)} {why}",
            hint="the file is damaged, or config.json belongs to another one: download it again",
        )

    def number(self, part: str) -> Tensor:
        """A tensor that holds a single number, float32 `[1]`."""
        tensor = self.tensors[part]
        if tensor.numel() != 1:
            raise self.broken(part, f"is {list(tensor.shape)} instead of one number")
        return tensor.float().view(1)

    def matrix(self) -> Tensor:
        """`weight` as it is stored, `[out, in]`."""
        weight = self.tensors["weight"]
        if weight.ndim != 2 or not weight.numel():
            raise self.broken("weight", f"is {list(weight.shape)}, no matrix")
        return weight

    def called(self) -> str:
        """What the weight is said to be."""
        return f"{self.numbers.bits} bit {self.numbers.kind}" if self.numbers else "8 bit int"

    def decode(self) -> QuantizedWeight:
        """Codes and parameters, whatever the form."""
        return forms.stored_as(self.tensors).decode(self)

    def affine(self, codes: Tensor, bits: int) -> QuantizedWeight:
        """Integers, codes uint8 `[out, in]`, with their scales and zero points."""
        scale, group_size = self.scale(codes)
        column_group = self.column_group(codes.shape[1], group_size, scale.shape[1])
        zero = self._zero(scale, bits)
        symmetric = zero is None
        if symmetric:
            zero = torch.full_like(scale, 2 ** (bits - 1))
        grid = AffineGrid(bits, group_size, symmetric)
        return QuantizedWeight(grid, codes, AffineParams(scale, zero), column_group)

    def scale(self, codes: Tensor) -> tuple[Tensor, int]:
        """Scales as float32 `[out, groups]`, and the columns of a group."""
        (out_features, in_features), stored = codes.shape, self.tensors["weight_scale"]
        rows, group_size = 1, in_features
        if self.numbers and self.numbers.strategy == "group":
            group_size = min(self.numbers.group_size, in_features)
        elif self.numbers and self.numbers.strategy == "block":
            rows, group_size = self.numbers.block
            group_size = min(group_size, in_features)
        elif self.numbers is None and stored.ndim == 2 and 0 < stored.shape[1] <= in_features:
            group_size = -(-in_features // stored.shape[1])
        expected = -(-out_features // rows), -(-in_features // group_size)
        if expected[1] == 1 and stored.numel() == 1:
            scale = stored.reshape(1, 1).expand(expected)
        else:
            scale = stored.unsqueeze(1) if stored.ndim == 1 else stored
        if stored.dtype not in SCALES or tuple(scale.shape) != expected:
            raise self.broken(
                "weight_scale",
                f"is {stored.dtype} {list(stored.shape)} instead of {list(expected)} for a weight of "
                f"{list(codes.shape)}",
            )
        return scale.float().repeat_interleave(rows, 0)[:out_features], group_size

    def rows_of_scale(self, codes: Tensor) -> int:
        """How many rows share one of the scales; 0 where one is for the whole tensor."""
        if self.tensors["weight_scale"].numel() == 1 and codes.numel() > 1:
            return 0
        return self.numbers.block[0] if self.numbers and self.numbers.strategy == "block" else 1

    def _zero(self, scale: Tensor, bits: int) -> Tensor | None:
        """Zero points as codes, float32 `[out, groups]`; None where none are stored. Packed along out, or
        plain int8 as compressed-tensors before 0.9 stored them."""
        stored = self.tensors.get("weight_zero_point")
        if stored is None:
            if self.numbers and not self.numbers.symmetric:
                return self.tensors["weight_zero_point"].float()  # absent: the mapping's own error
            return None
        out_features, groups = scale.shape
        packed = stored.dtype == torch.int32 and "weight_packed" in self.tensors
        if packed and tuple(stored.shape) == (-(-out_features * bits // WORD), groups):
            return unpack(stored, bits, out_features).float()
        half = 2 ** (bits - 1)
        plain = stored.float().reshape(-1, 1) if stored.ndim < 2 else stored.float()
        if not packed and plain.shape[1] == groups and len(plain) in (1, out_features):
            low, high = plain.aminmax()
            if -half <= low and high < half:
                return None if low == high == 0 else (plain + half).expand(scale.shape)
        raise self.broken(
            "weight_zero_point",
            f"is {stored.dtype} {list(stored.shape)} for scales of {list(scale.shape)} and {bits} bit",
        )

    def column_group(self, in_features: int, group_size: int, groups: int) -> Tensor | None:
        """Group of each column, `[in]`; None where they lie in order and divide the row."""
        trivial = torch.arange(in_features, device=self.tensors["weight_scale"].device) // group_size
        stored = self.tensors.get("weight_g_idx", trivial).long()
        if (stored == -1).all():  # how compressed-tensors writes that there is no order
            stored = trivial
        if stored.shape != trivial.shape or not 0 <= stored.min() <= stored.max() < groups:
            raise self.broken(
                "weight_g_idx", f"is {list(stored.shape)}, no group of {groups} for each column"
            )
        return None if in_features % group_size == 0 and torch.equal(stored, trivial) else stored
