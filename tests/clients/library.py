"""Run by the client environment's python: what the compressed-tensors library makes of given tensors.

usage: library.py FOLDER. `inputs.safetensors` holds codes to pack, `packed.BITS.DIM` int8, and activations to
quantize and scale back, `input.NAME`; `arguments.json` says how for each NAME. `weight.NAME` is quantized to
MXFP8. Results go to `outputs.safetensors` under the same names, the scales of weights as `scale.NAME`.
"""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file


def compressed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and exponents of a weight by the preset MXFP8."""
    scheme: QuantizationScheme = preset_name_to_scheme("MXFP8", ["Linear"])
    groups = weight.unflatten(1, (-1, scheme.weights.group_size))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    stored = MXFP8QuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    return stored["weight"], stored["weight_scale"]


def main(folder: Path) -> None:
    arguments = json.loads((folder / "arguments.json").read_text())
    inputs = load_file(folder / "inputs.safetensors")
    outputs = {}
    for key, tensor in inputs.items():
        kind, _, name = key.partition(".")
        if kind == "packed":
            bits, dim = name.split(".")
            outputs[key] = pack_to_int32(tensor, int(bits), packed_dim=int(dim))
        elif kind == "input":
            how = QuantizationArgs(**arguments[name])
            scale, zero = inputs.get(f"scale.{name}"), inputs.get(f"zero.{name}")
            if how.dynamic:
                scale, zero = compute_dynamic_scales_and_zp(tensor, how, None, inputs.get(f"global.{name}"))
            outputs[key] = fake_quantize(tensor, scale, zero, how, global_scale=inputs.get(f"global.{name}"))
        elif kind == "weight":
            outputs[key], outputs[f"scale.{name}"] = compressed(tensor)
    save_file({name: tensor.contiguous() for name, tensor in outputs.items()}, folder / "outputs.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
