"""The bitsandbytes layouts, read by transformers, vLLM (NF4) and other users of bitsandbytes.

LLM.int8: `weight` int8 `[out, in]`, `SCB` float32 `[out]` (row absmax), `weight_format` uint8 scalar 0;
`W = weight * SCB / 127`.
NF4: `weight` uint8 `[out * in / 2, 1]`, row-major, the first of two codes in the high nibble;
`weight.quant_map` float32 `[16]`; `weight.absmax` float32 `[out * in / 64]` or, double-quantized, uint8 with
`weight.nested_absmax` float32 and `weight.nested_quant_map` float32 `[256]`;
`weight.quant_state.bitsandbytes__nf4`, a JSON text in uint8.
Format: bitsandbytes `nn/modules.py` (Linear8bitLt, Params4bit) and `functional.QuantState`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantkit.errors import UNSUPPORTED, QuantkitError, require
from quantkit.layouts import Layout, LinearSpec, Table, Tensors, Width, not_converted, spec_of_shape
from quantkit.layouts._late import grids, int8, levels, nf4, torch

NAME = "bitsandbytes"
STATE = "weight.quant_state.bitsandbytes__nf4"
BLOCK, NESTED_BLOCK = 64, 256
TABLE_VALUES, NESTED_TABLE_VALUES = 16, 256  # NF4's table, and that of 8-bit scales
EXPERT_LINEARS = 3  # gate, up and down
FUSES = "transformers fuses experts and replaces nn.Linear alone"


@dataclass(frozen=True)
class Int8Layout(Layout):
    """threshold: columns with an input of at least this size are computed in 16 bit; 0: none are."""

    threshold: float = 6.0
    marker = "SCB"
    label = "int8"
    suffixes = ("weight", "SCB", "weight_format")
    floats = ("SCB",)
    optional = ("weight_format",)
    rounds_inputs = True

    def check_experts(self, linears: int) -> str | None:
        return f"no client reads experts in int8: {FUSES}, and vLLM takes none that are quantized before"

    def tensors(self, spec: LinearSpec) -> Table:
        shape = spec.out_features, spec.in_features
        return {"weight": ("I8", shape), "SCB": ("F32", shape[:1]), "weight_format": ("U8", ())}

    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        return {
            "weight": (weight.codes ^ 128).view(torch.int8),  # q + 128 to two's complement
            "SCB": weight.params.absmax[:, 0].contiguous(),
            "weight_format": torch.zeros((), dtype=torch.uint8),
        }

    def sizes(self, tensors: Mapping[str, Any]) -> LinearSpec:
        rows, columns = tensors["weight"].shape
        return spec_of_shape(rows, columns, Width(8, columns))

    def decode(self, tensors: Tensors) -> grids.QuantizedWeight:
        spec = self.checked_spec(tensors)
        if "weight_format" in tensors and tensors["weight_format"].any():
            what = f"an int8 weight of weight_format {tensors['weight_format'].tolist()} is not supported"
            raise QuantkitError(what, "save it again with a current bitsandbytes", UNSUPPORTED)
        codes, absmax = tensors["weight"].view(torch.uint8) ^ 128, tensors["SCB"].float()[:, None]
        return grids.QuantizedWeight(int8.Int8Grid(spec.in_features), codes, levels.Absmax(absmax))

    def module(
        self, tensors: Tensors, bias: torch.Tensor | None, values: torch.Tensor, products: bool
    ) -> torch.nn.Module:
        return int8.Int8Linear(tensors["weight"], tensors["SCB"].float(), bias, self.threshold, products)

    def config(self, specs: Sequence[LinearSpec], outside: Sequence[str] = ()) -> dict:
        """Return `quantization_config`. Its list of exceptions must name the head, or clients quantize it."""
        return {
            "quant_method": "bitsandbytes",
            "load_in_8bit": True,
            "load_in_4bit": False,
            "llm_int8_threshold": self.threshold,
            "llm_int8_skip_modules": not_converted(specs, outside),
            "llm_int8_has_fp16_weight": False,
            "llm_int8_enable_fp32_cpu_offload": False,
        }


@dataclass(frozen=True)
class Nf4Layout(Layout):
    """double_quant: absmax values are stored in 8 bits. The grid's own check keeps blocks inside rows."""

    double_quant: bool = True
    marker = STATE
    label = "nf4"
    suffixes = (
        "weight", "weight.absmax", "weight.quant_map",
        "weight.nested_absmax", "weight.nested_quant_map", STATE,
    )  # fmt: skip
    floats = ("weight.absmax", "weight.nested_absmax", STATE)
    texts = (STATE,)
    experts_note = f"experts in nf4 are for vLLM on one GPU, which was not tried here: {FUSES}"

    def check_experts(self, linears: int) -> str | None:
        if linears == EXPERT_LINEARS:
            return None
        return f"no client reads such experts in nf4: {FUSES}, and vLLM takes those of gate, up and down"

    def tensors(self, spec: LinearSpec) -> Table:
        blocks, offset = spec.weights // BLOCK, None
        table: Table = {
            "weight": ("U8", (spec.weights // 2, 1)),
            "weight.quant_map": ("F32", (TABLE_VALUES,)),
            "weight.absmax": ("U8" if self.double_quant else "F32", (blocks,)),
        }
        if self.double_quant:
            table["weight.nested_absmax"] = "F32", (-(-blocks // NESTED_BLOCK),)
            table["weight.nested_quant_map"] = "F32", (NESTED_TABLE_VALUES,)
            offset = 0.12345678901234567  # a number of usual length
        text = _state(spec.out_features, spec.in_features, offset)
        return table | {STATE: ("U8", (len(text),))}

    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        params, pairs = weight.params, weight.codes.reshape(-1, 2)
        tensors = {"weight": pairs[:, :1] << 4 | pairs[:, 1:], "weight.quant_map": torch.tensor(nf4.TABLE)}
        offset = None
        if self.double_quant:
            offset = params.offset.flatten()[0].item()
            tensors |= {
                "weight.absmax": params.code.flatten(),
                "weight.nested_absmax": params.nested.flatten()[::NESTED_BLOCK].contiguous(),
                "weight.nested_quant_map": nf4.dynamic_map().clone(),
            }
        else:
            tensors["weight.absmax"] = params.absmax.flatten()
        text = _state(*weight.codes.shape, offset)
        return tensors | {STATE: torch.frombuffer(bytearray(text), dtype=torch.uint8)}

    def with_floats(self, tensors: Tensors, floats: Tensors) -> dict[str, torch.Tensor]:
        """See `Layout.with_floats`. The JSON text keeps its length when the offset in it changes."""
        encoded = super().with_floats(tensors, floats)
        if "offset" in floats:
            encoded[STATE] = _with_offset(tensors[STATE], floats["offset"].item())
        return encoded

    def decode(self, tensors: Tensors) -> grids.QuantizedWeight:
        """Invert `encode` exactly. Raises QuantkitError if sizes do not fit or the table is not NF4's."""
        spec, absmax, packed = self.checked_spec(tensors), tensors["weight.absmax"], tensors["weight"]
        _expect(tensors["weight.quant_map"], torch.tensor(nf4.TABLE))
        codes = torch.cat([packed >> 4, packed & 15], 1).view(spec.out_features, spec.in_features)
        absmax = absmax.view(spec.out_features, spec.in_features // BLOCK)
        if absmax.dtype != torch.uint8:
            return grids.QuantizedWeight(nf4.Nf4Grid(False), codes, levels.Absmax(absmax.float()))
        _expect(tensors["weight.nested_quant_map"], nf4.dynamic_map())
        offset = torch.tensor(_read_state(tensors[STATE])["nested_offset"], device=absmax.device)
        params = nf4.NestedParams.of(absmax, tensors["weight.nested_absmax"], offset)
        return grids.QuantizedWeight(nf4.Nf4Grid(), codes, params)

    def sizes(self, tensors: Tensors) -> LinearSpec:
        return spec_of_shape(*_read_state(tensors[STATE])["shape"], Width(4, BLOCK))

    def checked_spec(self, tensors: Mapping[str, Any]) -> LinearSpec:
        """See `Layout.checked_spec`. `weight.absmax` is uint8 if the weight is double-quantized."""
        nested = str(tensors["weight.absmax"].dtype) in ("U8", "torch.uint8")
        return super(Nf4Layout, replace(self, double_quant=nested)).checked_spec(tensors)

    def config(self, specs: Sequence[LinearSpec], outside: Sequence[str] = ()) -> dict:
        return {
            "quant_method": "bitsandbytes",
            "load_in_8bit": False,
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": self.double_quant,
            "bnb_4bit_compute_dtype": "float32",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": not_converted(specs, outside),
        }

    def configured(self, config: Mapping[str, Any], quantization: dict) -> dict:
        """Return config.json; clients multiply in the model's own type if it has 16 bits, else in float32."""
        dtype = config.get("dtype") or config.get("torch_dtype")
        fits = {"bnb_4bit_compute_dtype": dtype} if dtype in ("bfloat16", "float16") else {}
        return super().configured(config, quantization | fits)


def detect(config: dict) -> Layout | None:
    """Return the layout that a stored `quantization_config` describes; None if it is not bitsandbytes."""
    method = config.get("quant_method")
    if method != "bitsandbytes" and (method or not {"load_in_8bit", "load_in_4bit"} & config.keys()):
        return None
    if config.get("load_in_8bit"):
        threshold = config.get("llm_int8_threshold", 6.0)
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
            what = f"quantization_config says llm_int8_threshold {threshold!r}"
            raise QuantkitError(what, "download config.json again")
        return Int8Layout(float(threshold))
    what = "quantization_config says neither load_in_8bit nor load_in_4bit"
    require(config.get("load_in_4bit"), what, "download config.json again")
    kind = config.get("bnb_4bit_quant_type")
    what = f"bitsandbytes 4-bit type {kind!r} is not supported"
    require(kind == "nf4", what, "quantkit reads int8 and nf4", UNSUPPORTED)
    return Nf4Layout(bool(config.get("bnb_4bit_use_double_quant")))


def _state(out_features: int, in_features: int, offset: float | None) -> bytes:
    """Return the JSON text of an NF4 weight's quantization state; offset: of nested scales, if any."""
    state = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": "float16",
        "shape": [out_features, in_features],
    }
    if offset is not None:
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    return json.dumps(state).encode()


def _with_offset(text: torch.Tensor, offset: float) -> torch.Tensor:
    """Return the stored JSON text with another offset, at the same length. The offset has at most nine
    digits, as many as fit, and spaces fill the rest."""
    state, stored = json.loads(bytes(text.tolist())), torch.tensor(offset)
    if torch.equal(torch.tensor(float(state["nested_offset"])), stored):
        return text
    for digits in range(9, 0, -1):
        state["nested_offset"] = float(f"{offset:.{digits}g}")
        if len(changed := json.dumps(state).encode()) <= len(text):
            return torch.frombuffer(bytearray(changed.ljust(len(text))), dtype=torch.uint8).to(text.device)
    return text  # no digit has room


def _read_state(tensor: torch.Tensor) -> dict:
    """Return the parsed JSON text of an NF4 weight. Raises QuantkitError if a needed field is invalid."""
    try:
        state = json.loads(bytes(tensor.tolist()))
        out_features, in_features = state["shape"]
        readable = state["blocksize"] == BLOCK and state.get("nested_blocksize", NESTED_BLOCK) == NESTED_BLOCK
        readable = readable and in_features % BLOCK == 0 and type(out_features) is type(in_features) is int
        state["nested_offset"] = float(state.get("nested_offset", 0))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise QuantkitError(f"{STATE} is not supported: {error}", "download it again") from error
    what = f"nf4 blocks of {state['blocksize']} in rows of {in_features} are not supported"
    require(readable, what, "quantkit reads blocks of 64 that lie inside rows", UNSUPPORTED)
    return state


def _expect(stored: torch.Tensor, table: torch.Tensor) -> None:
    table = table.to(stored.device)
    same = stored.shape == table.shape and torch.allclose(stored.float(), table, rtol=0, atol=1e-6)
    require(same, "the code table of an nf4 weight is not NF4's", "save it again", UNSUPPORTED)
