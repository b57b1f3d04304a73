"""The layout of GGUF files, read by llama.cpp and its kin. `blocks.py` has ggml's blocks, bit by bit.

In staging, linear X is `X.ggml`, its bytes, and `X.ggml_type`, ggml's number for the type; of NVFP4, too,
`X.ggml_scale`, float32 `[1]`, what all of it is multiplied with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.layouts import Layout, LinearSpec, Table, of_linear
from quantkit.layouts._headers import Codes, Header, Headers

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.grids.grid import QuantizedWeight

NAME = "gguf"
PLAIN = re.compile(r"(F|BF|I)\d+$")  # types whose values are not coded


@dataclass(frozen=True)
class GgmlLayout(Layout):
    """Blocks as they will lie in the GGUF file."""

    marker = "ggml"
    suffixes = ("ggml", "ggml_type", "ggml_scale")
    floats = ("ggml",)
    fused = False

    def check(self, spec: LinearSpec) -> str | None:
        """Only ggml's own grids, and whole blocks."""
        from quantkit.grids.ggml.block import BlockGrid

        if not isinstance(spec.grid, BlockGrid):
            return f"a GGUF file holds ggml's block types, not {spec.grid.describe()}"
        if spec.in_features % spec.grid.group_size:
            size = spec.grid.group_size
            return f"in_features {spec.in_features} is no multiple of {spec.grid.name}'s {size}"
        return None

    def tensors(self, spec: LinearSpec) -> Table:
        """The blocks; of NVFP4, too, what all of them is multiplied with."""
        from quantkit.layouts.ggml.blocks import row_bytes

        blocks = {"ggml": ("U8", (spec.out_features, row_bytes(spec.grid.name, spec.in_features)))}
        return blocks | ({"ggml_scale": ("F32", (1,))} if spec.grid.joint else {})

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Bytes `[out, row_bytes]` and the type's number, a scalar; where it has one, a scale of it all."""
        import torch
        from gguf import GGMLQuantizationType

        from quantkit.layouts.ggml.blocks import pack

        number = torch.tensor(GGMLQuantizationType[weight.grid.name].value, dtype=torch.int32)
        tensors = {"ggml": pack(weight.grid, weight.codes, weight.params), "ggml_type": number}
        if hasattr(weight.params, "divisor"):
            tensors["ggml_scale"] = 1 / weight.params.divisor.flatten()[:1]
        return tensors

    def decode(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """Exact inverse of `encode`."""
        from gguf import GGMLQuantizationType

        from quantkit.grids.ggml import TYPES, named
        from quantkit.grids.grid import QuantizedWeight
        from quantkit.layouts.ggml.blocks import unpack

        name = GGMLQuantizationType(int(tensors["ggml_type"])).name
        if name not in TYPES:
            raise QuantkitError(
                f"blocks of type {name}{of_linear(tensors)} are not understood",
                hint=f"known are {', '.join(TYPES)}",
                exit_code=UNSUPPORTED,
            )
        grid = named(name)
        return QuantizedWeight(grid, *unpack(grid, tensors["ggml"], tensors.get("ggml_scale")))

    def config(self, specs: Sequence[LinearSpec], beside: Sequence[str] = ()) -> dict:
        """None: a GGUF file says what every tensor is."""
        return {}


def detect(config: dict) -> None:
    """Never: no checkpoint folder holds blocks, only staging does."""
    return None


# ---- from headers alone


def codes_of(header: Header) -> Codes | None:
    """How a tensor of a GGUF file is coded; None where it is not."""
    if PLAIN.match(header.dtype):
        return None
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[header.dtype]]
    digits = re.match(r"(?:MX|NV)?[A-Z]*(\d)", header.dtype)
    shape = header.shape if len(header.shape) == 2 else None
    return Codes(header.dtype, int(digits[1]) if digits else 8, block, shape, math.prod(header.shape))


def scaled_by(name: str, infos: Mapping[str, Header]) -> str | None:
    """The matrix in NVFP4 that a tensor of a GGUF file has a scale of; None where it is something else."""
    for ending in (".scale", ".input_scale"):
        owner = infos.get(f"{name.removesuffix(ending)}.weight")
        if name.endswith(ending) and owner is not None and owner.dtype == "NVFP4":
            return owner.name
    return None


HEADERS = Headers(marks=())
CLIENTS = {
    "transformers": [
        {
            "model_type": [
                "gptneox", "starcoder", "olmo2", "olmoe", "granite", "command-r", "chatglm", "glm4",
                "exaone4", "smollm3", "granitemoe", "deepseek2", "gpt-oss", "llama4",
            ],
            "loads": False,
            "note": "it does not read GGUF files of this architecture",
        },
        {
            "rope_scaled": True,
            "loads": False,
            "note": "it would compute without the scaling of its positions",
        },
        {
            "experts": True,
            "not_model_type": ["minimax-m2"],
            "loads": False,
            "note": "it takes experts that lie in one tensor apart wrongly, or not at all",
        },
        {
            "model_type": "llama",
            "biases": True,
            "loads": False,
            "note": "it would compute without the biases",
        },
        {
            "form": "NVFP4",
            "loads": False,
            "note": "it takes the scales beside NVFP4's blocks for weights",
        },
        {
            "not_form": [
                "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
                "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
            ],
        },
        {
            "model_type": ["llama", "qwen2", "bloom", "starcoder2", "minimax-m2", "qwen35"],
            "loads": True,
            "note": "decoded, by gguf_file=NAME",
            "option": "gguf_file=NAME",
        },
    ],
    "vLLM": [{"loads": False, "note": "its CPU build does not read it"}],
    "llama.cpp": [
        {
            "model_type": [
                "llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gptneox", "bloom", "falcon",
                "starcoder", "starcoder2", "olmo2", "granite", "stablelm", "command-r", "chatglm", "glm4",
                "exaone4", "smollm3", "nemotron", "qwen35", "qwen2moe", "qwen3moe", "olmoe", "ernie4_5-moe",
                "glm4moe", "dots1", "minimax-m2", "granitemoe", "deepseek2", "gpt-oss", "llama4",
            ],
            "loads": True,
        },
        {},
    ],
}  # fmt: skip
