"""Run by a client environment's python: what the client computes with checkpoints. quantkit is not imported.

usage: load_client.py JOBS.json with `{ids, want, threads, jobs: [{name, folder, loader, dtype}]}`, ids
`[windows, tokens]`. want `logits`: those of the first window go to `logits.safetensors` beside JOBS.json.
want `nll`: the mean negative log likelihood over all windows. Everything else goes to `results.json`; a
checkpoint that the client cannot load is a result, too. A job with `dequantize` computes with the decoded
weights, in plain torch, and leaves activations alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from importlib import metadata
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the first forward otherwise compiles for many seconds
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

PACKAGES = {
    "transformers": ("transformers", "compressed-tensors", "bitsandbytes", "gptqmodel", "optimum"),
    "gptqmodel": ("gptqmodel", "transformers"),
    "autogptq": ("auto-gptq", "transformers"),
    "autoawq": ("autoawq", "transformers"),
}


def load_transformers(folder: str, dtype: torch.dtype, dequantize: bool) -> torch.nn.Module:
    """transformers; dequantize: GPTQ and AWQ in the kernels that decode exactly, others decoded at once."""
    import transformers

    asked: dict = {}
    quantization = json.loads(Path(folder, "config.json").read_text()).get("quantization_config", {})
    method = quantization.get("quant_method")
    if method == "gptq":
        asked = {"quantization_config": transformers.GPTQConfig(quantization["bits"], backend="gptq_torch")}
    elif method == "awq":
        asked = {
            "quantization_config": transformers.AwqConfig(bits=quantization["bits"], backend="torch_awq")
        }
    elif method == "compressed-tensors" and dequantize:
        asked = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **asked)
    if method == "bitsandbytes" and dequantize:
        return model.dequantize().to(dtype)
    if method == "bitsandbytes":  # keeps the stored precision whatever is asked for
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    return model


def load_gptqmodel(folder: str, dtype: torch.dtype, dequantize: bool) -> torch.nn.Module:
    from gptqmodel import BACKEND, GPTQModel

    return GPTQModel.load(folder, backend=BACKEND.GPTQ_TORCH, dtype=dtype, device="cpu").model


def load_autogptq(folder: str, dtype: torch.dtype, dequantize: bool) -> torch.nn.Module:
    """AutoGPTQ ties embeddings to the head that no file holds, not the other way round: put them back."""
    from auto_gptq import AutoGPTQForCausalLM
    from safetensors.torch import load_file

    model = AutoGPTQForCausalLM.from_quantized(
        folder, device="cpu", torch_dtype=dtype, use_safetensors=True, model_basename="model",
        use_triton=False, disable_exllama=True, disable_exllamav2=True,
        inject_fused_attention=False, inject_fused_mlp=False,
    ).model  # fmt: skip
    if model.config.tie_word_embeddings:
        stored = load_file(Path(folder, "model.safetensors"))
        embeddings = {name: tensor for name, tensor in stored.items() if name.endswith("embed_tokens.weight")}
        assert len(embeddings) == 1 and not model.load_state_dict(embeddings, strict=False).unexpected_keys
    return model


def load_autoawq(folder: str, dtype: torch.dtype, dequantize: bool) -> torch.nn.Module:
    """On a CPU it wants IPEX or triton unless told otherwise; its plain torch path needs neither."""
    import awq.models.base
    import awq.modules.linear.gemm
    from awq import AutoAWQForCausalLM

    awq.modules.linear.gemm.TRITON_AVAILABLE = False
    awq.models.base.get_best_device = lambda: "x"
    return AutoAWQForCausalLM.from_quantized(
        folder, fuse_layers=False, device_map={"": "cpu"}, torch_dtype=dtype
    ).model


LOADERS = {
    "transformers": load_transformers,
    "gptqmodel": load_gptqmodel,
    "autogptq": load_autogptq,
    "autoawq": load_autoawq,
}


@torch.no_grad()
def nll(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Mean negative log likelihood, in nats, of every token but each window's first.

    One window at a time: bitsandbytes decides which columns are outliers for a whole batch.
    """
    total = 0.0
    for rows in ids.split(1):
        logits = model(rows).logits[:, :-1].float()
        total += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"
        ).item()
    return total / ids[:, 1:].numel()


@torch.no_grad()
def main(path: Path) -> None:
    request = json.loads(path.read_text())
    torch.set_num_threads(request["threads"])
    ids = torch.tensor(request["ids"])
    logits, results = {}, {}
    for job in request["jobs"]:
        try:
            loader = LOADERS[job["loader"]]
            model = loader(job["folder"], getattr(torch, job["dtype"]), job.get("dequantize", False))
            result = {"error": None, "kernel": kernel(model)}
            if request["want"] == "nll":
                result["nll"] = nll(model, ids)
            else:
                logits[job["name"]] = model(ids[:1]).logits[0].float()
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        result["versions"] = versions(job["loader"])
        results[job["name"]] = result
        print(job["name"], result, file=sys.stderr)
    if logits:
        from safetensors.torch import save_file

        save_file(logits, path.with_name("logits.safetensors"))
    path.with_name("results.json").write_text(json.dumps(results, indent=2) + "\n")


def kernel(model: torch.nn.Module) -> str:
    """Class of the first block's first linear: which kernel ran."""
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "c_attn")):
            return type(module).__name__
    return "?"


def versions(loader: str) -> dict[str, str]:
    found = {}
    for package in ("torch", *PACKAGES[loader]):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, metavar="JOBS.json")
    main(parser.parse_args().path)
