"""Runs a checkpoint in mlx-lm; see wire.py.

The only option is `dtype=float32`: weights decoded by `mx.dequantize`, and products in float32. By itself mlx
accumulates in the model's type of 16 bit on a CPU.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


def load(request: dict) -> tuple[Any, Any]:
    """Return a function from ids to logits, and one that returns facts; see wire.py."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx_lm
    import numpy as np
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    config = json.loads(Path(request["model"], "config.json").read_text())
    if "model_file" in config and not request["trust_remote_code"]:
        raise ValueError("config.json names Python code, which mlx-lm would run: --trust-remote-code")
    model, _ = mlx_lm.load(request["model"])
    packed = [module for _, module in model.named_modules() if hasattr(module, "scales")]
    names = Counter(f"{type(module).__name__} {module.bits} bit {module.mode}" for module in packed)
    if request["options"].get("dtype") == "float32":
        plain = {nn.QuantizedLinear: nn.Linear, nn.QuantizedEmbedding: nn.Embedding}
        plain[QuantizedSwitchLinear] = SwitchLinear
        for module in packed:
            parts = module.weight, module.scales, getattr(module, "biases", None)
            how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
            module.weight = mx.dequantize(*parts, **how).astype(mx.float32)
            module.__class__ = plain[type(module)]
        model.set_dtype(mx.float32)
    types = (values.dtype for _, values in nn.utils.tree_flatten(model.parameters()))
    # not of codes, nor of 8-bit scales
    dtypes = Counter(dtype for dtype in types if mx.issubdtype(dtype, mx.floating))

    def compute(ids: list[int]) -> Any:
        return np.array(model(mx.array([ids]))[0].astype(mx.float32))

    def facts() -> dict:
        dtype = str(dtypes.most_common(1)[0][0]).rpartition(".")[2]
        kernels = f"{names.most_common(1)[0][0]}, {len(packed)} modules" if packed else "Linear"
        return {"version": mlx_lm.__version__, "kernels": kernels, "dtype": dtype}

    return compute, facts
