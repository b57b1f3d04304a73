"""The layout of NVIDIA's ModelOpt, for TensorRT-LLM, SGLang, vLLM and Modular MAX: NVFP4 and FP8.

Scales are float32: `[]` for one number, `[out]` for rows, `[out / 128, 1, in / 128, 1]` for blocks. NVFP4's
`weight_scale_2` and `input_scale` are factors, where compressed-tensors stores divisors. Format:
nvidia-modelopt 0.47 `torch/export` (`quant_utils.py`, `convert_hf_config.py`); vLLM's `modelopt.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quantkit.errors import UNSUPPORTED, require
from quantkit.layouts import LinearSpec, Table, Tensors, damaged, kept_names
from quantkit.layouts._late import grids, torch
from quantkit.layouts.compressed_tensors import Renamed
from quantkit.layouts.compressed_tensors.floats import FloatQuantized, NvFp4Packed
from quantkit.layouts.compressed_tensors.forms import Form
from quantkit.layouts.compressed_tensors.schemes import Scheme, numbers

NAME = "modelopt"
FILE = "hf_quant_config.json"
PRODUCER = {"name": NAME, "version": "0.47.0", "written_by": "quantkit"}  # vLLM looks for this name
FORMS: dict[str, Form] = {  # by quant_algo
    "FP8": FloatQuantized(static=True, whole=True),
    "FP8_PER_CHANNEL_PER_TOKEN": FloatQuantized(),
    "fp8_pb_wo": FloatQuantized(128),  # "weights only", but engines round inputs
    "NVFP4": NvFp4Packed(quantize_inputs=True),
    "W4A16_NVFP4": NvFp4Packed(),
}
GROUPED = ("FP8", "NVFP4", "W4A16_NVFP4")  # ModelOpt writes no config_groups for the others
FLOAT8_CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}
FACTORS = {"weight_global_scale": "weight_scale_2", "input_global_scale": "input_scale"}  # by divisors


@dataclass(frozen=True)
class ModelOptLayout(Renamed):
    """A form of FORMS, or those of a stored configuration."""

    form: Form = NvFp4Packed()
    suffixes = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    optional = ("input_scale",)
    cache_scales = ("k_proj.k_scale", "v_proj.v_scale")
    renamed = {"weight_packed": "weight"} | FACTORS
    whole_blocks = ("out_features", "in_features")

    def tensors(self, spec: LinearSpec) -> Table:
        table = super().tensors(spec)
        if isinstance(self.form, FloatQuantized):
            dtype, shape = table["weight_scale"]
            table["weight_scale"] = dtype, (shape[0], 1, shape[1], 1) if self.form.block else shape[:1]
        return {suffix: (dtype, () if shape == (1,) else shape) for suffix, (dtype, shape) in table.items()}

    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        tensors = super().encode(weight)
        factors = FACTORS.values() if "weight_scale_2" in tensors else ()
        return {suffix: 1 / tensor if suffix in factors else tensor for suffix, tensor in tensors.items()}

    def translated(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Return the tensors as the form stores them. Raises QuantkitError unless factors are above 0."""
        stored = super().translated(tensors)
        for suffix in stored.keys() & FACTORS.keys():
            if not 0 < stored[suffix].item() < math.inf:
                raise damaged(tensors, f"{FACTORS[suffix]} is {stored[suffix].item():g}, not above 0")
            stored[suffix] = 1 / stored[suffix].float()
        return stored

    def decode(self, tensors: Tensors) -> grids.QuantizedWeight:
        """Invert `encode` exactly. If `weight_scale_2` is no power of two, as ModelOpt writes it, the scales
        become products, rounded as there. Raises QuantkitError if the tensors do not fit each other."""
        weight = super().decode(tensors)
        factor = tensors["weight_scale_2"].float() if "weight_scale_2" in tensors else 1.0
        if math.frexp(factor)[0] == 0.5:
            return weight
        params = weight.params
        return replace(weight, params=replace(params, scale=params.scale * factor, divisor=params.divisor**0))

    def config(self, specs: Sequence[LinearSpec], outside: Sequence[str] = ()) -> dict:
        weights, stored = self.form.weights(), self.files(specs, outside)[FILE]["quantization"]
        entry = {key: weights[key] for key in (*FLOAT8_CACHE, "group_size") if weights[key] is not None}
        inputs = {"input_activations": entry} if self.form.activations() else {}
        groups = {"group_0": inputs | {"weights": entry, "targets": ["Linear"]}}
        config = {"config_groups": groups} if stored["quant_algo"] in GROUPED else {}
        config |= {"ignore": stored["exclude_modules"], "quant_algo": stored["quant_algo"]}
        config |= {"kv_cache_scheme": FLOAT8_CACHE} if self.cache else {}
        return config | {"producer": PRODUCER, "quant_method": NAME}

    def files(self, specs: Sequence[LinearSpec], outside: Sequence[str] = ()) -> dict[str, dict]:
        """Return hf_quant_config.json. Engines match `exclude_modules` as shells match names of files."""
        head = [] if any(spec.head for spec in specs) else ["lm_head"]
        towers = [pattern for name in outside for pattern in (name, f"{name}.*")]
        quantization = {
            "quant_algo": next(algo for algo, form in FORMS.items() if form == self.form),
            "kv_cache_quant_algo": "FP8" if self.cache else None,
            **({"group_size": self.form.GROUP} if isinstance(self.form, NvFp4Packed) else {}),
            "exclude_modules": [*head, *towers, *kept_names(specs)],
        }
        return {FILE: {"producer": PRODUCER, "quantization": quantization}}


def completed(config: dict, read: Callable[[str], dict | None]) -> dict:
    """Return config.json, with the contents of hf_quant_config.json if it has no `quantization_config`, as in
    older exports. read: returns the contents of a JSON file by name; None if it is absent."""
    stored = {} if "quantization_config" in config else read(FILE) or {}
    quantization = stored.get("quantization", stored)
    if not isinstance(quantization, dict) or not quantization.get("quant_algo"):  # at most the cache is
        return config
    cache = {"kv_cache_scheme": quantization.get("kv_cache_quant_algo")}
    return config | {"quantization_config": cache | quantization | {"quant_method": NAME}}


def detect(config: dict) -> ModelOptLayout | None:
    """Return the layout that a stored configuration describes; None for other layouts."""
    if not str(config.get("quant_method")).startswith(NAME):
        return None
    layers, algos = config.get("quantized_layers"), {"Linear": config.get("quant_algo")}
    if algos["Linear"] == "MIXED_PRECISION" and isinstance(layers, dict):  # experts by the module around them
        names = {name: rf"re:{re.escape(name)}\." if name.endswith("experts") else name for name in layers}
        algos = {
            names[name]: layer.get("quant_algo") for name, layer in layers.items() if isinstance(layer, dict)
        }
    forms, cache = {algo.upper(): form for algo, form in FORMS.items()}, config.get("kv_cache_scheme")
    targets = {name: forms.get(str(algo).upper()) for name, algo in algos.items()}
    wrong = [f"quant_algo {algo!r}" for name, algo in algos.items() if not targets[name]]
    wrong += [f"KV cache {cache!r}"] * (cache not in (None, "FP8", FLOAT8_CACHE))
    what = f"ModelOpt's {(wrong or ['quantized_layers'])[0]} is not supported"
    hint = f"quantkit reads {', '.join(FORMS)}, and of caches 8-bit floats"
    require(targets and not wrong, what, hint, UNSUPPORTED)
    inputs = {
        form: numbers("activations", entry) for form in targets.values() if (entry := form.activations())
    }
    schemes = tuple((name, Scheme(form, inputs.get(form))) for name, form in targets.items())
    return ModelOptLayout([*inputs, *targets.values()][0], schemes)
