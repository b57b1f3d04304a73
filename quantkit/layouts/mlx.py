"""The MLX layout, read by mlx-lm and the programs built on it.

Mode affine, per linear: `W[o, i] = scales[o, i // group_size] * q[o, i] + biases[o, i // group_size]`;
`weight` uint32 `[out, in * bits / 32]`, a little-endian bit stream of q along each row; `scales` and `biases`
`[out, in / group_size]` in the type of the model. Modes mxfp4, nvfp4 and mxfp8: `weight` holds 4-bit or 8-bit
floats in the same order, and `scales` uint8 are powers of two or, in nvfp4, e4m3 without a divisor.
config.json has bits, group size and mode of the model, and of each linear that differs, by name.
Format: mlx 0.32 `mx.quantize`; mlx-lm 0.32 `utils.load_model`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.errors import UNSUPPORTED, QuantkitError, require
from quantkit.layouts import DTYPES, Layout, LinearSpec, Table, Tensors, Width, spec_of_shape
from quantkit.layouts._late import biased, grids, torch
from quantkit.layouts._packing import WORD, pack, unpack, words
from quantkit.layouts.compressed_tensors.floats import MxFp4Packed, MxFp8, NvFp4Packed

NAME = "mlx"
SWITCH = ".switch_mlp."  # in mlx-lm's names of experts, which it stacks
EXPERT = re.compile(r"\.experts\.(\d+)\.(?=(gate|up|down)_proj\b)")
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
FLOATS = {"mxfp4": MxFp4Packed(), "nvfp4": NvFp4Packed(), "mxfp8": MxFp8()}


@dataclass(frozen=True)
class MlxLayout(Layout):
    """bits, group_size, mode: of linears that `entries` does not name. entries: the same of others, as in
    config.json."""

    bits: int
    group_size: int
    mode: str = "affine"
    entries: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    marker = "scales"
    suffixes = ("weight", "scales", "biases")
    floats = ("scales", "biases")
    outside = frozenset({"head", "embedding"})
    fused = False

    @property
    def label(self) -> str:
        return NAME if self.mode == "affine" else self.mode

    def at(self, linear: str) -> MlxLayout:
        return MlxLayout(**self.entries.get(EXPERT.sub(SWITCH, linear), self._entry(self)))

    def _entry(self, grid: Any) -> dict[str, Any]:
        """Return the entry of a linear with the bits and group size of `grid`."""
        return {"group_size": grid.group_size, "bits": grid.bits, "mode": self.mode}

    def unstacked(self, infos: dict[str, Any]) -> dict[str, Any]:
        """See `Layout.unstacked`. A stack is `[experts, ...]`."""
        unstacked = {name: info for name, info in infos.items() if SWITCH not in name or not info.nbytes}
        for name in infos.keys() - unstacked.keys():
            count, *shape = infos[name].shape
            size = infos[name].nbytes // count
            for k in range(count):
                expert = name.replace(SWITCH, f".experts.{k}.")
                span = {"offset": infos[name].offset + k * size, "nbytes": size}
                unstacked[expert] = replace(infos[name], name=expert, shape=tuple(shape), **span)
        return unstacked

    def stacks(self, names: Iterable[str]) -> dict[str, list[str]]:
        stacks: dict[str, list[str]] = {}
        for _, name in sorted((int(part[1]), name) for name in names if (part := EXPERT.search(name))):
            stacks.setdefault(EXPERT.sub(SWITCH, name), []).append(name)
        return stacks

    def of_job(self, specs: Sequence[LinearSpec]) -> MlxLayout:
        """Return a copy with entries for linears that differ. Raises QuantkitError if stacked ones do."""
        entries: dict[str, Any] = {}
        for spec in specs:
            name, entry = EXPERT.sub(SWITCH, spec.name), self._entry(spec.grid) if spec.grid else None
            equal = entries.setdefault(name, entry) == entry
            hint = "change the pattern so that all experts of a layer have the same bits"
            require(equal, f"mlx-lm stacks experts: those of {name} differ", hint, UNSUPPORTED)
        usual = None, self._entry(self)
        return replace(self, entries={name: entry for name, entry in entries.items() if entry not in usual})

    def check(self, spec: LinearSpec) -> str | None:
        if spec.conv1d:
            return "mlx-lm would transpose the codes of a Conv1D: use gptq"
        bits, size = spec.grid.bits, spec.grid.group_size
        if self.mode == "affine" and (bits not in BITS or size not in GROUPS):
            return (
                f"MLX has 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128, not {bits} in groups of {size}"
            )
        return None

    def grid(self, grid: grids.Grid, dtype: torch.dtype | None) -> grids.Grid:
        if self.mode != "affine":
            return replace(grid, divisor=1.0) if self.mode == "nvfp4" else grid
        name = str(dtype or "bfloat16").removeprefix("torch.")
        return biased.BiasedGrid(grid.bits, grid.group_size, name, grid.search, grid.clip)

    def tensors(self, spec: LinearSpec) -> Table:
        groups = spec.out_features, -(-spec.in_features // spec.grid.group_size)
        table = {"weight": ("U32", (spec.out_features, words(spec.in_features, spec.grid.bits)))}
        if self.mode != "affine":
            return table | {"scales": ("U8", groups)}
        dtype = DTYPES[getattr(spec.grid, "dtype", "bfloat16")]
        return table | {"scales": (dtype, groups), "biases": (dtype, groups)}

    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        assert weight.column_group is None, "MLX stores no order of columns"
        if form := FLOATS.get(self.mode):
            parts = form.encode(weight)
            packed = parts[form.CODES[0]].contiguous().view(torch.uint32)
            return {"weight": packed, "scales": parts["weight_scale"].view(torch.uint8)}
        packed = pack(weight.codes.t(), weight.grid.bits).t().contiguous().view(torch.uint32)
        return {"weight": packed, "scales": weight.params.scale, "biases": weight.params.bias}

    def sizes(self, tensors: Mapping[str, Any]) -> LinearSpec:
        out_features, groups = tensors["scales"].shape
        if tensors["weight"].shape[1] * WORD != groups * self.group_size * self.bits:
            raise ValueError
        return spec_of_shape(out_features, groups * self.group_size, Width(self.bits, self.group_size))

    def decode(self, tensors: Tensors) -> grids.QuantizedWeight:
        spec, packed, scales = self.checked_spec(tensors), tensors["weight"], tensors["scales"]
        if form := FLOATS.get(self.mode):
            stored = scales.view(torch.float8_e4m3fn) if self.mode == "nvfp4" else scales
            parts = {form.CODES[0]: packed.view(torch.uint8), "weight_scale": stored}
            return form.decode(parts | {"weight_global_scale": torch.ones(1, device=scales.device)}, spec)
        codes = unpack(packed.view(torch.int32).t(), self.bits, spec.in_features).t().contiguous()
        grid = biased.BiasedGrid(self.bits, self.group_size, str(scales.dtype).removeprefix("torch."))
        return grids.QuantizedWeight(grid, codes, biased.BiasedParams(scales, tensors["biases"]))

    def config(self, specs: Sequence[LinearSpec], outside: Sequence[str] = ()) -> dict:
        """Return `quantization_config`. mlx-lm takes modules without scales for 16 bit."""
        return {"quant_method": NAME} | self._entry(self) | self.entries

    def configured(self, config: Mapping[str, Any], quantization: dict) -> dict:
        """Return config.json with `quantization`, which mlx-lm reads, and an equal `quantization_config`.

        mlx-lm 0.32 does not read the `rope_parameters` that transformers 5 writes: without `rope_theta` it
        computes with 10,000.
        """
        entry = {key: value for key, value in quantization.items() if key != "quant_method"}
        rope = config.get("rope_parameters")
        theta = {"rope_theta": rope["rope_theta"]} if isinstance(rope, dict) and "rope_theta" in rope else {}
        return theta | super().configured(config, quantization) | {"quantization": entry}


def detect(config: dict) -> MlxLayout | None:
    """Return the MLX layout that a stored `quantization` describes; None for other layouts."""
    if config.get("quant_method") != NAME:
        return None
    named = {name: _checked(value) for name, value in config.items() if isinstance(value, dict)}
    return MlxLayout(**_checked(config), entries=named)


def _checked(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return bits, group size and mode alone. Raises QuantkitError if MLX does not have them."""
    bits, size, mode = entry.get("bits"), entry.get("group_size"), entry.get("mode", "affine")
    if mode != "affine" and mode not in FLOATS:
        modes = f"quantkit reads affine, {', '.join(FLOATS)}"
        raise QuantkitError(f"MLX's mode {mode!r} is not supported", modes, UNSUPPORTED)
    form = FLOATS.get(mode)
    fits = (bits, size) == (form.BITS, form.GROUP) if form else bits in BITS and size in GROUPS
    wrong = f"quantization says {bits!r} bits in groups of {size!r}, which MLX's {mode} does not have"
    require(fits and type(bits) is type(size) is int, wrong, "download config.json again")
    return {"group_size": size, "bits": bits, "mode": mode}
