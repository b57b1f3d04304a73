"""Forms of floats of 8 bits (FP8, MXFP8) and 4 bits (MXFP4, NVFP4). Inputs may be rounded to the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantkit.errors import UNSUPPORTED, require
from quantkit.layouts import LinearSpec, Statistic, Table, Tensors, Width, damaged, spec_of_shape
from quantkit.layouts._late import float8, fp4, grids, torch
from quantkit.layouts._packing import column_groups
from quantkit.layouts.compressed_tensors.forms import Form, Numbers, described

FP4_MOST = 448.0 * 6.0  # that e4m3 times e2m1 can be


@dataclass(frozen=True)
class FloatQuantized(Form):
    """float-quantized: 8-bit floats, usually for inputs too (FP8, FP8_DYNAMIC, FP8_BLOCK).

    `weight` float8 e4m3 `[out, in]`; `weight_scale` bfloat16, `[out, 1]` per row or `[out / 128, in / 128]`
    per square (sizes rounded up); `input_scale` bfloat16 `[1]` if static. One scale for a whole tensor is
    `[1]`; only the layout modelopt writes it.

    block: rows and columns that share a scale; None: one scale per row. static: one scale of the inputs per
    linear, from calibration text; otherwise each token, or each `block` columns of a token, get a scale at
    run time. whole: one scale for the whole tensor.
    """

    block: int | None = None
    static: bool = False
    whole: bool = False
    NAME, LABEL = "float-quantized", "float8"
    SUFFIXES = ("weight", "weight_scale", "input_scale")
    CODES = ("weight", "F8_E4M3")
    optional = ("input_scale",)

    @classmethod
    def like(cls, weights: Numbers, inputs: Numbers | None) -> FloatQuantized | None:
        """Return the form for 8-bit floats scaled per tensor, row or square block; None for other weights."""
        rows, columns = weights.block or (None, None)
        matches = (weights.bits, weights.kind, weights.symmetric) == (8, "float", True) and rows == columns
        matches = matches and weights.strategy in ("tensor", "channel", "block")
        static = bool(inputs) and not inputs.dynamic
        return cls(rows, static, weights.strategy == "tensor") if matches else None

    @property
    def needs(self) -> frozenset[Statistic]:
        return frozenset({Statistic.PEAK} if self.static else ())

    def tensors(self, spec: LinearSpec) -> Table:
        rows, columns = (self.block, self.block) if self.block else (1, spec.in_features)
        scales = (1,) if self.whole else (-(-spec.out_features // rows), -(-spec.in_features // columns))
        shape = spec.out_features, spec.in_features
        table: Table = {"weight": ("F8_E4M3", shape), "weight_scale": ("BF16", scales)}
        return table | ({"input_scale": ("BF16", (1,))} if self.static else {})

    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        grid = weight.grid
        scale = weight.params.scale[:: grid.rows].to(grid.stored)
        scale = scale.view(1) if self.whole else scale.contiguous()
        tensors = {"weight": weight.codes.contiguous().view(float8.FLOAT8), "weight_scale": scale}
        if self.static:
            tensors["input_scale"] = _input_scale(weight.input_peak, float8.LARGEST_FLOAT8, grid.stored)
        return tensors

    def decode(self, tensors: Tensors, spec: LinearSpec) -> grids.QuantizedWeight:
        weight, stored = tensors["weight"], tensors["weight_scale"]
        rows = float8.WHOLE if self.whole else self.block or 1
        scale = stored.float().reshape(1, 1) if self.whole else stored.float()
        scale = scale.repeat_interleave(min(rows, len(weight)), 0)[: len(weight)]
        group = column_groups(tensors, "weight", None, spec, weight.device)
        dtype, peak = str(stored.dtype).removeprefix("torch."), tensors.get("input_scale")
        grid = float8.Float8Grid(spec.grid.group_size, rows, scale_dtype=dtype)
        if peak is not None:
            peak = peak.float().view(()) * float8.LARGEST_FLOAT8
        return grids.QuantizedWeight(grid, weight.view(torch.uint8), float8.Float8Params(scale), group, peak)

    def weights(self) -> dict:
        block = [self.block, self.block] if self.block else None
        return described(8, "float", "block" if self.block else "channel", block_structure=block)

    def activations(self) -> dict:
        if self.static:
            return described(8, "float", "tensor")
        return described(8, "float", "group" if self.block else "token", self.block, True, None)


def _input_scale(peak: torch.Tensor | None, most: float, dtype: Any) -> torch.Tensor:
    """Return the stored scale of inputs, `[1]` of a torch dtype; epsilon if all inputs are zero.

    Raises QuantkitError if no token of the calibration text reached the linear.
    """
    what = "static scales need inputs, and no calibration text enters one of these linears"
    hint = "leave out --static, or keep such linears in 16 bit with --exclude"
    require(peak is not None, what, hint, UNSUPPORTED)
    stored = (peak.float() / most).to(dtype).view(1)
    return torch.where(stored == 0, torch.finfo(dtype).eps, stored)


@dataclass(frozen=True)
class MxFp4Packed(Form):
    """mxfp4-pack-quantized: 4-bit floats; 32 weights share a power of two.

    `weight_packed` uint8 `[out, in / 2]`: two e2m1 codes in a byte, the first in the low bits; `weight_scale`
    uint8 `[out, in / 32]`: exponent plus 127. quantize_inputs: inputs are rounded too, with powers of two
    computed at run time.
    """

    quantize_inputs: bool = False
    NAME, LABEL = "mxfp4-pack-quantized", "mxfp4"
    SUFFIXES = ("weight_packed", "weight_scale")
    CODES = ("weight_packed", "U8")
    BITS = 4
    GROUP = 32
    STRATEGY = "group"
    SCALE_DTYPE, SCALE = "torch.uint8", "U8"
    AT_RUN_TIME = {"dynamic": True, "observer": None}
    floats = ()

    @classmethod
    def like(cls, weights: Numbers, inputs: Numbers | None) -> MxFp4Packed | None:
        """Return the form for floats of BITS in groups of GROUP; None for other weights."""
        numbers = weights.bits, weights.kind, weights.strategy, weights.group_size
        return cls(bool(inputs)) if numbers == (cls.BITS, "float", cls.STRATEGY, cls.GROUP) else None

    def check(self, spec: LinearSpec) -> str | None:
        if spec.in_features % self.GROUP:
            return f"in_features {spec.in_features} is not a multiple of {self.GROUP}, the group size"
        return None

    def tensors(self, spec: LinearSpec) -> Table:
        rows, columns = spec.out_features, spec.in_features
        codes = self.CODES[1], (rows, columns * self.BITS // 8)
        return {self.CODES[0]: codes, "weight_scale": (self.SCALE, (rows, columns // self.GROUP))}

    def sizes(self, tensors: Tensors) -> LinearSpec:
        rows, columns = tensors[self.CODES[0]].shape
        spec = spec_of_shape(rows, columns * 8 // self.BITS, Width(self.BITS, self.GROUP))
        if why := self.check(spec):
            raise damaged(tensors, f"{self.CODES[0]} is {[rows, columns]}: {why}")
        return spec

    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        codes = weight.codes
        return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": self._scales(weight)}

    def _scales(self, weight: grids.QuantizedWeight) -> torch.Tensor:
        return (torch.frexp(weight.params.scale).exponent + fp4.MX_BIAS - 1).to(torch.uint8).contiguous()

    def decode(self, tensors: Tensors, spec: LinearSpec) -> grids.QuantizedWeight:
        scale = fp4.powers_of_two(tensors["weight_scale"].int() - fp4.MX_BIAS)
        params = fp4.Fp4Params(scale, torch.ones_like(scale))
        return grids.QuantizedWeight(fp4.MxFp4Grid(), _codes(tensors), params)

    def weights(self) -> dict[str, Any]:
        return described(self.BITS, "float", self.STRATEGY, self.GROUP, scale_dtype=self.SCALE_DTYPE)

    def activations(self) -> dict[str, Any] | None:
        return self.weights() | self.AT_RUN_TIME if self.quantize_inputs else None


def _codes(tensors: Tensors) -> torch.Tensor:
    """Return codes uint8 `[out, in]`, unpacked from two in a byte."""
    packed = tensors["weight_packed"]
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


@dataclass(frozen=True)
class MxFp8(MxFp4Packed):
    """mxfp8-quantized: `weight` float8 e4m3 `[out, in]`, usually with such inputs; scales as in MXFP4."""

    quantize_inputs: bool = True
    NAME, LABEL = "mxfp8-quantized", "mxfp8"
    SUFFIXES = ("weight", "weight_scale")
    CODES = ("weight", "F8_E4M3")
    BITS = 8
    no_experts = "no client that was tried reads experts in MXFP8; in --format fp8 transformers does"

    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        return {"weight": weight.codes.contiguous().view(float8.FLOAT8), "weight_scale": self._scales(weight)}

    def decode(self, tensors: Tensors, spec: LinearSpec) -> grids.QuantizedWeight:
        params = float8.Float8Params(fp4.powers_of_two(tensors["weight_scale"].int() - fp4.MX_BIAS))
        return grids.QuantizedWeight(float8.MxFp8Grid(), tensors["weight"].view(torch.uint8), params)


@dataclass(frozen=True)
class NvFp4Packed(MxFp4Packed):
    """nvfp4-pack-quantized: 4-bit floats; 16 weights share an e4m3 scale, and the matrix has one divisor.

    `weight_packed` as in MXFP4; `weight_scale` float8 e4m3 `[out, in / 16]`; `weight_global_scale` float32
    `[1]`, the divisor: `w = e2m1 * (weight_scale / weight_global_scale)`. If inputs are rounded too,
    `input_global_scale` float32 `[1]` is 448 * 6 / (the largest input in calibration text), and each 16
    inputs get a scale at run time. vLLM fuses q, k and v, and gate and up, and uses the largest divisor for
    all of them, so their divisors must be equal.
    """

    NAME, LABEL = "nvfp4-pack-quantized", "nvfp4"
    SUFFIXES = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    optional = ("input_global_scale",)
    GROUP = 16
    STRATEGY = "tensor_group"
    SCALE_DTYPE, SCALE = "torch.float8_e4m3fn", "F8_E4M3"
    AT_RUN_TIME = {"dynamic": "local", "observer": "static_minmax"}
    floats = ("weight_scale",)
    no_experts = "no client that was tried reads experts in NVFP4; in --format mxfp4 transformers does"

    @property
    def needs(self) -> frozenset[Statistic]:
        return frozenset({Statistic.PEAK} if self.quantize_inputs else ())

    def tensors(self, spec: LinearSpec) -> Table:
        divisors = ["weight_global_scale"] + ["input_global_scale"] * self.quantize_inputs
        return super().tensors(spec) | dict.fromkeys(divisors, ("F32", (1,)))

    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        divisor = weight.params.divisor.flatten()[:1].float().clone()
        tensors = super().encode(weight) | {"weight_global_scale": divisor}
        if self.quantize_inputs:
            peak = _input_scale(weight.input_peak, 1.0, divisor.dtype)
            tensors["input_global_scale"] = FP4_MOST / peak
        return tensors

    def _scales(self, weight: grids.QuantizedWeight) -> torch.Tensor:
        return weight.params.scale.to(torch.float8_e4m3fn).contiguous()

    def decode(self, tensors: Tensors, spec: LinearSpec) -> grids.QuantizedWeight:
        """Return codes, scales and the divisor. Raises QuantkitError unless the divisor is above 0."""
        scale, divisor = tensors["weight_scale"].float(), tensors["weight_global_scale"].float().view(1)
        if not (divisor > 0).all():
            raise damaged(tensors, f"weight_global_scale is {divisor.item():g}, not above 0")
        params = fp4.Fp4Params(scale, divisor.expand_as(scale))
        return grids.QuantizedWeight(fp4.NvFp4Grid(), _codes(tensors), params)
