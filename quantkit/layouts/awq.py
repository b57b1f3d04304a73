"""The AWQ layout in its GEMM version, read by transformers (with GPTQModel), vLLM, SGLang, TGI and AutoAWQ.

Per linear, `W[o, i] = scales[i // group_size, o] * (q[i, o] - z[i // group_size, o])`, 4 bit:
`qweight` int32 `[in, out / 8]`, nibble n of word c holds column `8 c + ORDER[n]`;
`qzeros` int32 `[groups, out / 8]` in the same order, holding z itself; `scales` float16 `[groups, out]`.
Format: AutoAWQ `WQLinear_GEMM.from_linear`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import UNSUPPORTED, require
from quantkit.layouts import Layout, LinearSpec, Numbers, Table, Tensors, Width, not_converted, spec_of_shape
from quantkit.layouts._late import affine, grids, torch
from quantkit.layouts._packing import no_whole_words, pack, unpack, words

NAME = "awq"
BITS = 4
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
PER_WORD = len(ORDER)
# transformers expects a scaled activation there (integrations/awq.py, AWQ_SCALES_MAPPINGS) and computes NaN.
ACTIVATION_SCALES = (
    "starcoder2", "RefinedWebModel", "falcon", "mpt", "gptj", "gpt_neox", "gpt_bigcode", "bloom"
)  # fmt: skip


@dataclass(frozen=True)
class AwqLayout(Layout):
    """group_size: of every linear; -1: one group per row. zero_point: zero points vary; False: all are 8."""

    group_size: int
    zero_point: bool = True
    marker = code_part = "qweight"
    label = NAME
    suffixes = ("qweight", "qzeros", "scales")
    floats = ("scales",)

    def check_model(self, model_type: str) -> str | None:
        if model_type in ACTIVATION_SCALES:
            return (
                f"transformers expects scales of activations in awq checkpoints of {model_type}, and "
                "quantkit folds them into weights: use --layout compressed-tensors"
            )
        return None

    def check(self, spec: LinearSpec) -> str | None:
        if spec.conv1d:
            return "awq's clients replace nn.Linear alone, and this is a Conv1D: use gptq"
        if spec.grid.bits != BITS:
            return f"awq holds 4 bit, not {spec.grid.bits}: --layout compressed-tensors holds 2 to 8 bits"
        expected = spec.in_features if self.group_size == -1 else self.group_size
        if spec.grid.group_size != expected:
            return f"awq holds one group size for all linears, {self.group_size}, not {spec.grid.group_size}"
        if spec.grid.symmetric == self.zero_point:
            return "awq's zero_point says whether all linears have zero points or none"
        return no_whole_words(spec, "out_features")

    def tensors(self, spec: LinearSpec) -> Table:
        columns = words(spec.out_features, spec.grid.bits)
        groups = -(-spec.in_features // spec.grid.group_size)
        return {
            "qweight": ("I32", (spec.in_features, columns)),
            "qzeros": ("I32", (groups, columns)),
            "scales": ("F16", (groups, spec.out_features)),
        }

    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        assert weight.column_group is None, "awq stores no g_idx"
        return {
            "qweight": _pack(weight.codes),
            "qzeros": _pack(weight.params.zero),
            "scales": weight.params.scale.t().half().contiguous(),
        }

    def sizes(self, tensors: Mapping[str, Any]) -> LinearSpec:
        groups, out_features = tensors["scales"].shape
        in_features, columns = tensors["qweight"].shape
        if in_features % groups or columns * PER_WORD != out_features:
            raise ValueError
        return spec_of_shape(out_features, in_features, Width(BITS, in_features // groups))

    @property
    def numbers(self) -> Numbers:
        return BITS, max(0, self.group_size) or None

    def decode(self, tensors: Tensors) -> grids.QuantizedWeight:
        spec = self.checked_spec(tensors)
        grid = affine.AffineGrid(BITS, spec.grid.group_size, symmetric=not self.zero_point)
        zero = _unpack(tensors["qzeros"], spec.out_features).float()
        params = affine.AffineParams(tensors["scales"].t().float(), zero)
        return grids.QuantizedWeight(grid, _unpack(tensors["qweight"], spec.out_features), params)

    def config(self, specs: Sequence[LinearSpec], outside: Sequence[str] = ()) -> dict:
        return {
            "quant_method": "awq",
            "bits": BITS,
            "group_size": self.group_size,
            "zero_point": self.zero_point,
            "version": "gemm",
            "modules_to_not_convert": not_converted(specs, outside),
        }


def detect(config: dict) -> AwqLayout | None:
    """Return the awq layout that a stored `quantization_config` describes; None for other layouts."""
    if config.get("quant_method") != "awq":
        return None
    version = str(config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm")
    bits = config.get("bits", config.get("w_bit"))
    group_size = config.get("group_size", config.get("q_group_size"))
    what = f"awq version {version!r} of {bits} bits is not supported"
    hint = "quantkit reads version gemm of 4 bits; convert others with the tool that wrote them"
    require(version.lower() == "gemm" and bits == BITS, what, hint, UNSUPPORTED)
    again = "download config.json again"
    require(type(group_size) is int, "quantization_config says no group_size", again)
    require(group_size, "quantization_config says groups of 0", again)
    return AwqLayout(group_size=group_size, zero_point=bool(config.get("zero_point", True)))


def _pack(values: torch.Tensor) -> torch.Tensor:
    """Convert `[out, n]` to int32 `[n, out / 8]`."""
    ordered = values.reshape(-1, PER_WORD, values.shape[1])[:, ORDER].flatten(0, 1)
    return pack(ordered, BITS).t().contiguous()


def _unpack(words: torch.Tensor, out_features: int) -> torch.Tensor:
    """Invert `_pack`: uint8 `[out, n]`."""
    ordered = unpack(words.t(), BITS, out_features).view(-1, PER_WORD, len(words))
    places = [ORDER.index(column) for column in range(PER_WORD)]
    return ordered[:, places].flatten(0, 1)
