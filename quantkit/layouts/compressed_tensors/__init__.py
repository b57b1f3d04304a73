"""The compressed-tensors layout, read by vLLM, SGLang and transformers: written packed, read in five forms.

Written, `pack-quantized`: `weight_packed` int32 `[out, in * bits / 32]`, a little-endian bit stream of
`q + 2^(bits-1)` along in; `weight_scale` float16 `[out, groups]`; `weight_shape` int64 `[2]`; where zero
points vary, `weight_zero_point` int32 `[out * bits / 32, groups]`, the same stream along out.
Read besides: `weight_g_idx`; `weight` int8 (int-quantized) or float8 e4m3 (float-quantized), either also
called naive-quantized, with scales per tensor, row, group or block; quantized activations.
Format: compressed-tensors 0.20 `compressors/pack_quantized`, `compressors/naive_quantized`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quantkit.errors import QuantkitError
from quantkit.layouts import Layout, LinearSpec, fusions
from quantkit.layouts._packing import no_whole_words, pack
from quantkit.layouts.compressed_tensors import schemes
from quantkit.layouts.compressed_tensors.headers import HEADERS as HEADERS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quantkit.grids.grid import QuantizedWeight

NAME = "compressed-tensors"


@dataclass(frozen=True)
class CompressedTensorsLayout(Layout):
    """bits, group_size (-1: whole rows) and symmetric are what is written; linears with other bits or
    groups become further config groups.

    targets: what a stored configuration says, and scheme what it says of one linear (see `at`).
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    targets: schemes.Targets = ()
    scheme: schemes.Scheme | None = None
    marker = "weight_scale"  # the one tensor that all forms have
    takes_matrices = True  # vLLM makes linears of routers, which its target "Linear" takes
    suffixes = (
        "weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
        "input_scale", "input_zero_point",
    )  # fmt: skip
    floats = ("weight_scale",)

    def at(self, linear: str) -> CompressedTensorsLayout:
        """With the scheme of one linear, where a stored configuration gives it one."""
        return replace(self, scheme=schemes.find(self.targets, linear)) if self.targets else self

    def check(self, spec: LinearSpec) -> str | None:
        """Rows must fill whole words, columns too where zeros are packed."""
        if spec.conv1d:
            return 'its target "Linear" misses Conv1D: use the gptq layout'
        return no_whole_words(spec, "in_features", *([] if self.symmetric else ["out_features"]))

    def nbytes(self, spec: LinearSpec) -> int:
        """Bytes of the three or four tensors of one linear."""
        groups = spec.in_features // spec.grid.group_size
        scale_bits = 16 + (0 if self.symmetric else spec.grid.bits)
        return (spec.weights * spec.grid.bits + groups * spec.out_features * scale_bits) // 8 + 2 * 8

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

    def decode(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """Exact inverse of `encode`, and any other form that is read.

        Raises QuantkitError naming the tensor whose type or size does not fit the others or the scheme.
        """
        from quantkit.layouts.compressed_tensors.stored import StoredWeight

        return StoredWeight(tensors, self.scheme.weights if self.scheme else None).decode()

    def module(self, tensors: Mapping[str, Tensor], bias: Tensor | None) -> nn.Module | None:
        """A linear that quantizes its input, where the scheme says so."""
        numbers = self.scheme.activations if self.scheme else None
        if numbers is None:
            return None
        from quantkit.layouts.compressed_tensors.activations import QuantizedInputLinear
        from quantkit.layouts.compressed_tensors.stored import StoredWeight

        stored = StoredWeight(tensors, self.scheme.weights)
        scale = None if numbers.dynamic else stored.number("input_scale")
        has_zero = not (numbers.dynamic or numbers.symmetric)
        zero = stored.number("input_zero_point") if has_zero else None
        weight = stored.decode().values()
        if numbers.group_size and weight.shape[1] % numbers.group_size:
            raise stored.broken(
                "weight", f"has rows that groups of {numbers.group_size} inputs do not divide"
            )
        return QuantizedInputLinear(weight, bias, numbers, scale, zero)

    def config(self, specs: Sequence[LinearSpec], beside: Sequence[str] = ()) -> dict:
        """`quantization_config`. Linears unlike the rest are targets by their exact names, which clients
        prefer to the class, and by the name of their fusion where all of it is alike: vLLM looks for that.
        """
        default = self.bits, self.group_size
        groups: dict[tuple[int, int], list[str]] = {}
        settings = {name: self._settings(spec) for spec in specs if spec.grid for name in spec.spellings}
        if default in settings.values():
            groups[default] = ["Linear"]
        for name, setting in settings.items():
            if setting != default:
                groups.setdefault(setting, []).append(name)
        for name, members in fusions(specs).items():
            of_members = {settings.get(row.name) for row in members}
            setting = of_members.pop()
            if not of_members and setting not in (default, None):
                groups[setting].append(name)
        kept = [name for spec in specs if spec.grid is None for name in spec.spellings]
        towers = [rf"re:{re.escape(name)}(\.|$)" for name in beside]
        return {
            "quant_method": NAME,
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": ["lm_head", *_outside(specs), *towers, *kept],
            "config_groups": {
                f"group_{index}": {
                    "targets": targets,
                    "weights": self._weights(*setting),
                    "input_activations": None,
                    "output_activations": None,
                    "format": "pack-quantized",
                }
                for index, (setting, targets) in enumerate(groups.items())
            },
        }

    def _settings(self, spec: LinearSpec) -> tuple[int, int]:
        """Bits and group size as the configuration names them."""
        whole = spec.grid.group_size == spec.in_features and self.group_size == -1
        return spec.grid.bits, -1 if whole else spec.grid.group_size

    def _weights(self, bits: int, group_size: int) -> dict:
        return {
            "num_bits": bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if group_size == -1 else "group",
            "group_size": None if group_size == -1 else group_size,
            "dynamic": False,
            "observer": "minmax",
        }


def _outside(specs: Sequence[LinearSpec]) -> list[str]:
    """A pattern for all that lies outside the blocks, such as a head of another name than lm_head; towers
    that are quantized are not part of it."""
    spec = specs[0]
    container = spec.name.removesuffix(f".{spec.block}.{spec.local}")
    if container == spec.name:
        return []
    inside = [rf"(.*\.)?{re.escape(container.rpartition('.')[2])}\.\d+\."]
    inside += [rf"{re.escape(name)}(\.|$)" for name in _towers(specs)]
    return [f"re:(?!{'|'.join(inside)})"]


def _towers(specs: Sequence[LinearSpec]) -> list[str]:
    """The outermost modules of linears beside the blocks, by all their spellings."""
    inside = [name for spec in specs if spec.block is not None for name in spec.spellings]
    above = {part for name in inside for part in _modules(name)}
    names = (name for spec in specs if spec.block is None for name in spec.spellings)
    return list(dict.fromkeys(next(m for m in _modules(name) if m not in above) for name in names))


def _modules(name: str) -> list[str]:
    """`a`, `a.b` and `a.b.c` of `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def detect(config: dict) -> CompressedTensorsLayout | None:
    """The layout that a stored `quantization_config` describes, if it is this one."""
    if config.get("quant_method") != NAME:
        return None
    if (status := config.get("quantization_status", "compressed")) != "compressed":
        raise QuantkitError(
            f"compressed-tensors: quantization_status {status!r}: the weights are not stored compressed",
            hint="save it compressed, as llm-compressor does by default",
        )
    return CompressedTensorsLayout(targets=schemes.parse(config))


PACKAGE = ["compressed-tensors"]
DECODED = {"note": "with dequantize=True", "needs": PACKAGE, "option": "dequantize=True"}
CLIENTS = {
    "transformers": [
        {
            "form": ["nvfp4", "mxfp4"],
            "loads": True,
            "note": "in bfloat16 or with dequantize=True",
            "needs": PACKAGE,
        },
        {
            "symmetric": False,
            "mixed": True,
            "form": "pack-quantized",
            "loads": False,
            "note": "it takes the first config group for all",
        },
        {
            "symmetric": False,
            "form": "pack-quantized",
            "loads": False,
            "note": "with dequantize=True it does",
        },
        {"experts": True, "mixed": True},
        {"experts": True, "loads": True, **DECODED},
        {"mixed": True, "loads": True, "note": "not with dequantize=True", "needs": PACKAGE},
        {"form": "int8", "activations": False, "loads": True, **DECODED},
        {"loads": True, "note": "with compressed-tensors installed", "needs": PACKAGE},
    ],
    "vLLM": [
        {"experts": True, "mixed": True},
        {
            "experts": True,
            "symmetric": False,
            "loads": False,
            "note": "its CPU build takes symmetric experts",
        },
        {
            "experts": True,
            "form": "pack-quantized",
            "group_size": [-1, 32],
            "loads": False,
            "note": "its CPU build takes experts in groups, of 64 or 128",
        },
        {"form": ["nvfp4", "mxfp4"], "loads": False, "note": "its CPU build has no kernel for it"},
        {"form": "int8", "activations": False, "loads": False, "note": "its CPU build has no kernel for it"},
        {"form": "pack-quantized", "not_bits": [4]},
        {
            "experts": True,
            "form": "pack-quantized",
            "loads": True,
            "note": "its CPU build wants AMX for experts",
        },
        {"experts": True},
        {"loads": True},
    ],
}
