"""Run by the client environment's python: what the compressed-tensors library makes of given tensors.

usage: library.py FOLDER. `inputs.safetensors` holds codes to pack, `packed.BITS.DIM` int8, and activations to
quantize and scale back, `input.NAME`; `arguments.json` says how for each NAME. Results go to
`outputs.safetensors` under the same names.
"""

import json
import sys
from pathlib import Path

from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file


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
    save_file({name: tensor.contiguous() for name, tensor in outputs.items()}, folder / "outputs.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
