"""Run by a python with mlx-lm: what it computes with checkpoints.

usage: mlx_load.py JOBS.json, as in load.py. mlx's CPU kernels accumulate in the model's 16 bit type. Packed
modules are therefore replaced by `mx.dequantize` of them, and all else is computed in float32; with the
loader "packed" nothing is replaced.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import load
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

PLAIN = {
    nn.QuantizedLinear: nn.Linear,
    nn.QuantizedEmbedding: nn.Embedding,
    QuantizedSwitchLinear: SwitchLinear,
}


def dequantized(module: nn.Module) -> mx.array:
    """The weight of a packed module, in float32."""
    parts = module.weight, module.scales, getattr(module, "biases", None)
    how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    return mx.dequantize(*parts, **how).astype(mx.float32)


def main(path: Path) -> None:
    mx.set_default_device(mx.cpu)
    request = json.loads(path.read_text())
    logits, results = {}, {}
    for job in request["jobs"]:
        try:
            model, _ = load(job["folder"])
            packed = {name: one for name, one in model.named_modules() if hasattr(one, "scales")}
            if job["loader"] != "packed":
                for module in packed.values():
                    module.weight = dequantized(module)
                    module.__class__ = PLAIN[type(module)]
                model.set_dtype(mx.float32)
            logits[job["name"]] = model(mx.array([request["ids"]]))[0].astype(mx.float32)
            results[job["name"]] = {"packed": len(packed), "error": None}
        except Exception as error:
            results[job["name"]] = {"error": f"{type(error).__name__}: {error}"[:500]}
    mx.save_safetensors(str(path.with_name("logits.safetensors")), logits)
    path.with_name("results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
