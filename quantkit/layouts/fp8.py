"""The layout of DeepSeek-V3, "finegrained fp8" in transformers: squares of 8-bit floats share a scale.

`weight` float8 e4m3 `[out, in]`; `weight_scale_inv` float32 `[out / 128, in / 128]`, sizes rounded up.
Despite its name, a square is *multiplied* with its scale. Inputs are also rounded to e4m3, in float32, with
one scale per token and 128 columns. Scales in E8M0 can be read, but are not written. Format: DeepSeek-V3
`inference/kernel.py`; transformers 5.23 `integrations/finegrained_fp8.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.errors import UNSUPPORTED, require
from quantkit.layouts import LinearSpec, Tensors, kept_names
from quantkit.layouts._late import activations, torch
from quantkit.layouts.compressed_tensors import Renamed
from quantkit.layouts.compressed_tensors.floats import FloatQuantized
from quantkit.layouts.compressed_tensors.forms import Numbers

NAME = "fp8"


@dataclass(frozen=True)
class Fp8Layout(Renamed):
    """form: has the rows and columns that share a scale. transformers misreads blocks with partial rows."""

    form: FloatQuantized = FloatQuantized(128)
    marker = "weight_scale_inv"
    suffixes = ("weight", "weight_scale_inv")
    floats = ("weight_scale_inv",)
    takes_matrices = False
    renamed = {"weight_scale": "weight_scale_inv"}
    whole_blocks = ("out_features",)

    def module(
        self, tensors: Tensors, bias: torch.Tensor | None, values: torch.Tensor, products: bool
    ) -> torch.nn.Module:
        size = math.gcd(self.form.block, values.shape[1])
        numbers = Numbers(8, "float", True, "group", group_size=size, dynamic=True)
        return activations.QuantizedInputLinear(values, bias, numbers, exact=True)

    def config(self, specs: Sequence[LinearSpec], outside: Sequence[str] = ()) -> dict:
        return {
            "quant_method": NAME,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.form.block, self.form.block],
            "modules_to_not_convert": ["lm_head", *outside, *kept_names(specs)],
        }


def detect(config: dict) -> Fp8Layout | None:
    """Return the fp8 layout that a stored `quantization_config` describes; None for other layouts."""
    if config.get("quant_method") != NAME:
        return None
    block, scheme = config.get("weight_block_size"), config.get("activation_scheme", "dynamic")
    experts = config.get("expert_dtype", "fp8")
    square = isinstance(block, list) and len(block) == 2 and type(block[0]) is int and block[0] > 0
    readable = square and block[0] == block[1] and (scheme, experts) == ("dynamic", "fp8")
    what = f"weight_block_size {block!r}, activation_scheme {scheme!r} and expert_dtype {experts!r}"
    hint = "quantkit reads square blocks with dynamic activations, as DeepSeek publishes them"
    require(readable, f"quantization 'fp8' with {what} is not supported", hint, UNSUPPORTED)
    return Fp8Layout(FloatQuantized(block[0]))
