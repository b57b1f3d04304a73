"""Runs a checkpoint in transformers, with the kernels of its clients; see wire.py.

Options are those of `from_pretrained`. `quantization_config`, an object, replaces single values of the
checkpoint's own.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any


def load(request: dict) -> tuple[Any, Any]:
    """Return a function from ids to logits, and one that returns facts; see wire.py."""
    import torch
    import transformers

    path, options = Path(request["model"]), {"dtype": "auto", **request["options"]}
    given: dict[str, Any] = {"trust_remote_code": request["trust_remote_code"], "local_files_only": True}
    if path.is_file():
        path, given["gguf_file"] = path.parent, path.name
    config = transformers.AutoConfig.from_pretrained(path, **given)
    config._attn_implementation = request["attention"]  # config.json may name a kernel of the hub
    if changed := options.pop("quantization_config", {}):
        config.quantization_config = dict(config.quantization_config) | changed
    given |= {"config": config, "device_map": {"": request["device"]}, "use_safetensors": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, **given, **options).eval()

    @torch.no_grad()
    def compute(ids: list[int]) -> Any:
        tokens = torch.tensor([ids], device=model.device)
        return model(tokens, use_cache=False).logits[0].float().cpu().numpy()

    def facts() -> dict:
        dtype = str(model.dtype).removeprefix("torch.")
        return {"version": transformers.__version__, "kernels": kernels(model)[0], "dtype": dtype}

    return compute, facts


def kernels(model: Any) -> tuple[str, bool]:
    """Return the most frequent class of quantized linears and True; without any, `torch Linear` and False."""
    quantized = Counter(
        f"{type(module).__module__.partition('.')[0]} {type(module).__name__}"
        for module in model.modules()
        if type(module).__module__.partition(".")[0] not in ("torch", "transformers")
        and not any(True for _ in module.children())
        and any(not t.is_floating_point() for t in (*module.parameters(), *module.buffers()))
    )
    return (quantized.most_common(1)[0][0], True) if quantized else ("torch Linear", False)
