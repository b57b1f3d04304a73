"""Run by a client environment's python: the loss of a checkpoint in the client. quantkit is not imported.

usage: load_client.py JOB.json with `{ids, folder, loader, dtype}`, ids `[windows, tokens]`. Leaves in
JOB.result.json the mean negative log likelihood over all windows and versions; or the error, if the client
cannot load the checkpoint. `dequantize`: decoded weights in plain torch, activations are not rounded.
"""

from __future__ import annotations

import argparse
import json
import os
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
}


def load(folder: str, loader: str, dtype: torch.dtype, dequantize: bool) -> torch.nn.Module:
    """Return the model. dequantize: GPTQ and AWQ in kernels that decode exactly, others decoded at once."""
    if loader == "gptqmodel":
        from gptqmodel import BACKEND, GPTQModel

        return GPTQModel.load(folder, backend=BACKEND.GPTQ_TORCH, dtype=dtype, device="cpu").model
    import transformers

    options: dict = {}
    quantization = json.loads(Path(folder, "config.json").read_text()).get("quantization_config", {})
    method = quantization.get("quant_method")
    if method == "gptq":
        options["quantization_config"] = transformers.GPTQConfig(quantization["bits"], backend="gptq_torch")
    elif method == "awq":
        options["quantization_config"] = transformers.AwqConfig(
            bits=quantization["bits"], backend="torch_awq"
        )
    elif method == "compressed-tensors" and dequantize:
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    if method == "bitsandbytes" and dequantize:
        return model.dequantize().to(dtype)
    if method == "bitsandbytes":  # keeps the stored precision whatever is asked for
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    return model


@torch.no_grad()
def nll(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Return the mean negative log likelihood, in nats, of all tokens but each window's first.

    One window at a time: bitsandbytes decides which columns are outliers for a whole batch.
    """
    total = 0.0
    for rows in ids.split(1):
        logits = model(rows).logits[:, :-1].float()
        total += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"
        ).item()
    return total / ids[:, 1:].numel()


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    torch.set_num_threads(1)
    try:
        model = load(job["folder"], job["loader"], getattr(torch, job["dtype"]), job.get("dequantize", False))
        result = {"error": None, "nll": nll(model, torch.tensor(job["ids"]))}
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    installed = {each.metadata["Name"].lower() for each in metadata.distributions()}
    names = [name for name in ("torch", *PACKAGES[job["loader"]]) if name in installed]
    result["versions"] = {name: metadata.version(name) for name in names}
    path.with_suffix(".result.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, metavar="JOB.json")
    main(parser.parse_args().path)
