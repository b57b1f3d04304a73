"""Forms of integers: packed in words (weights only), or one byte each with inputs rounded to 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantkit.layouts import LinearSpec, OutOfReach, Table, Tensors, Width, damaged, spec_of_shape
from quantkit.layouts._late import affine, grids, torch
from quantkit.layouts._packing import WORD, column_groups, no_whole_words, pack, unpack, words
from quantkit.layouts.compressed_tensors.forms import Form, Numbers, described

WIDTHS = range(2, 9)  # bits of packed integers
SIGN_OFFSET = 128  # integers of 8 bits are stored without a sign in memory, with one on disk


@dataclass(frozen=True)
class PackQuantized(Form):
    """pack-quantized: integers of 2 to 8 bits in 32-bit words (W4A16, W8A16).

    `weight_packed` int32 `[out, in * bits / 32]`, a little-endian bit stream of `q + 2^(bits-1)` along in;
    `weight_scale` float16 `[out, groups]`; `weight_shape` int64 `[2]`; if zero points vary,
    `weight_zero_point` int32 `[out * bits / 32, groups]`, the same stream along out. `weight_g_idx` int32
    `[in]` is read, but not written.

    bits, group_size (-1: one group per row) and symmetric hold for most linears; linears with other bits or
    groups get their own config groups. inputs: "fp8" or "int8" with one scale per token (W4A8), or "".
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    inputs: str = ""
    NAME = LABEL = "pack-quantized"
    SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    CODES = ("weight_packed", "I32")
    optional = ("weight_g_idx",)

    @classmethod
    def like(cls, weights: Numbers, inputs: Numbers | None) -> PackQuantized | None:
        """Return the form for integers scaled per row or group; None for other weights."""
        matches = weights.kind == "int" and weights.bits in WIDTHS
        matches = matches and weights.strategy in ("channel", "group")
        return cls(weights.bits, weights.group_size or -1, weights.symmetric) if matches else None

    def of(self, spec: LinearSpec) -> PackQuantized:
        whole = spec.grid.group_size == spec.in_features and self.group_size == -1
        return replace(self, bits=spec.grid.bits, group_size=-1 if whole else spec.grid.group_size)

    def check(self, spec: LinearSpec) -> str | None:
        return no_whole_words(spec, "in_features", *([] if self.symmetric else ["out_features"]))

    def tensors(self, spec: LinearSpec) -> Table:
        rows, bits, groups = spec.out_features, spec.grid.bits, -(-spec.in_features // spec.grid.group_size)
        table: Table = {
            "weight_packed": ("I32", (rows, words(spec.in_features, bits))),
            "weight_scale": ("F16", (rows, groups)),
            "weight_shape": ("I64", (2,)),
        }
        return table | ({} if self.symmetric else {"weight_zero_point": ("I32", (words(rows, bits), groups))})

    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        bits = weight.grid.bits
        tensors = {
            "weight_packed": pack(weight.codes.t(), bits).t().contiguous(),
            "weight_scale": weight.params.scale.half().contiguous(),
            "weight_shape": torch.tensor(weight.codes.shape),
        }
        if not weight.grid.symmetric:
            tensors["weight_zero_point"] = pack(weight.params.zero, bits)
        return tensors

    def fitting(self, tensors: Tensors) -> PackQuantized:
        columns, groups = int(tensors["weight_shape"][1]), tensors["weight_scale"].shape[1]
        bits = tensors["weight_packed"].shape[1] * WORD // columns
        return replace(
            self, bits=bits, group_size=-(-columns // groups), symmetric="weight_zero_point" not in tensors
        )

    def sizes(self, tensors: Tensors) -> LinearSpec:
        """Return the shape in `weight_shape`. Raises QuantkitError if `weight_shape` holds no valid shape."""
        stored, packed = tensors["weight_shape"], tensors["weight_packed"].shape
        try:
            shape = stored.tolist()
        except OutOfReach:  # rows fill whole words, as far as headers tell
            shape = [packed[0], packed[1] * WORD // self.bits]
        if len(stored.shape) != 1 or len(shape) != 2 or not min(shape) >= 1:
            raise damaged(tensors, f"weight_shape is {shape}, no shape")
        size = shape[1] if self.group_size == -1 else min(self.group_size, shape[1])
        return spec_of_shape(*shape, Width(self.bits, size, self.symmetric))

    def decode(self, tensors: Tensors, spec: LinearSpec) -> grids.QuantizedWeight:
        bits, size, scale = self.bits, spec.grid.group_size, tensors["weight_scale"].float()
        group = tensors.get("weight_g_idx")
        if group is not None and (group == -1).all():  # how compressed-tensors writes that there is no order
            group = None
        group = column_groups(tensors, "weight_g_idx", group, spec, scale.device)
        zero = torch.full_like(scale, 2 ** (bits - 1))
        if not self.symmetric:
            zero = unpack(tensors["weight_zero_point"], bits, spec.out_features).float()
        codes = unpack(tensors["weight_packed"].t(), bits, spec.in_features).t().contiguous()
        grid = affine.AffineGrid(bits, size, self.symmetric)
        return grids.QuantizedWeight(grid, codes, affine.AffineParams(scale, zero), group)

    def weights(self) -> dict:
        by = ("channel", None) if self.group_size == -1 else ("group", self.group_size)
        return described(self.bits, "int", *by, symmetric=self.symmetric)

    def activations(self) -> dict | None:
        kind = {"fp8": "float", "int8": "int"}.get(self.inputs)
        return kind and described(8, kind, "token", dynamic=True, observer=None)


@dataclass(frozen=True)
class IntQuantized(Form):
    """int-quantized (W8A8): symmetric integers, one byte each, one scale per row; inputs get one scale per
    token. `weight` int8 `[out, in]`; `weight_scale` float16 `[out, 1]`."""

    NAME, LABEL = "int-quantized", "int8"
    SUFFIXES = ("weight", "weight_scale")
    CODES = ("weight", "I8")

    @classmethod
    def like(cls, weights: Numbers, inputs: Numbers | None) -> IntQuantized | None:
        """Return the form for 8-bit integers scaled per row, unless inputs have stored scales; else None."""
        numbers = weights.bits, weights.kind, weights.symmetric, weights.strategy
        matches = numbers == (8, "int", True, "channel") and (inputs is None or inputs.dynamic)
        return cls() if matches else None

    def check(self, spec: LinearSpec) -> str | None:
        whole = spec.grid.group_size == spec.in_features
        return None if whole else "int8 engines take one scale for each row: leave out the group size"

    def tensors(self, spec: LinearSpec) -> Table:
        shape = spec.out_features, spec.in_features
        return {"weight": ("I8", shape), "weight_scale": ("F16", (shape[0], 1))}

    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        scale = weight.params.scale.half().contiguous()
        return {"weight": (weight.codes ^ SIGN_OFFSET).view(torch.int8).contiguous(), "weight_scale": scale}

    def decode(self, tensors: Tensors, spec: LinearSpec) -> grids.QuantizedWeight:
        codes, scale = tensors["weight"].view(torch.uint8) ^ SIGN_OFFSET, tensors["weight_scale"].float()
        params = affine.AffineParams(scale, torch.full_like(scale, SIGN_OFFSET))
        return grids.QuantizedWeight(affine.AffineGrid(8, spec.in_features), codes, params)

    def weights(self) -> dict:
        return described(8, "int", "channel")

    def activations(self) -> dict:
        return described(8, "int", "token", dynamic=True, observer=None)
