"""Run by the client environment's python: what an independent client computes with checkpoints.

Each line of stdin is the path of a JOBS.json. For each job `{name, folder, loader, dtype}` the logits
`[tokens, vocabulary]` go to `logits.safetensors` beside JOBS.json, and everything else to `results.json`; a
checkpoint that the client cannot load is a result, too. Then a line goes to stdout. quantkit is not imported
here.
"""

import hashlib
import json
import os
import sys
import traceback
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the first forward otherwise compiles for many seconds
os.environ["HF_HUB_OFFLINE"] = "1"

import bitsandbytes
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AwqConfig, CompressedTensorsConfig, GPTQConfig


def load(folder: str, loader: str, dtype: torch.dtype) -> torch.nn.Module:
    """`gptqmodel` is GPTQModel's own loader, all others are transformers', each with plain torch kernels."""
    if loader == "gptqmodel":
        from gptqmodel import BACKEND, GPTQModel

        return GPTQModel.load(folder, backend=BACKEND.GPTQ_TORCH, dtype=dtype, device="cpu").model
    if loader == "bitsandbytes":  # everything is taken from config.json; what is not packed is cast by hand
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for module in model.modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                module.compute_dtype = dtype  # the stored one is for GPUs: here values are compared
        return model
    if loader == "fp8":  # of which transformers makes bfloat16 where there is no GPU
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(dtype)
    if loader == "bitsandbytes decoded":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).dequantize().to(dtype)
    stored = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    config = {  # all else is taken from config.json
        "gptq": lambda: GPTQConfig(bits=stored["bits"], backend="gptq_torch"),
        "awq": lambda: AwqConfig(bits=stored["bits"], backend="torch_awq"),
        "compressed": lambda: CompressedTensorsConfig(dequantize=False),
        "dequantized": lambda: CompressedTensorsConfig(dequantize=True),
    }[loader]()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)


def is_packed(module: torch.nn.Module) -> bool:
    kinds = [bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt]
    if gptqmodel := sys.modules.get("gptqmodel.nn_modules.qlinear"):  # whose import takes seconds
        kinds.append(gptqmodel.BaseQuantLinear)
    return isinstance(module, tuple(kinds)) or hasattr(module, "weight_packed")


def digests(model: torch.nn.Module) -> dict[str, str]:
    """Hash of every plain linear's weight as float32: what a client decoded, bit for bit."""
    return {
        name: hashlib.sha256(module.weight.float().numpy().tobytes()).hexdigest()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


@torch.no_grad()
def main(path: Path) -> None:
    torch.set_num_threads(1)
    request = json.loads(path.read_text())
    ids = torch.tensor([request["ids"]])
    logits, results = {}, {}
    for job in request["jobs"]:
        try:
            model = load(job["folder"], job["loader"], getattr(torch, job["dtype"]))
            packed = sum(is_packed(module) for module in model.modules())
            logits[job["name"]] = model(ids).logits[0].float()
            tokens = ids[:, : request["prompt"]]
            for _ in range(request["new_tokens"]):
                best = model(tokens).logits[0, -1].argmax()
                tokens = torch.cat([tokens, best.view(1, 1)], 1)
            result = {"tokens": tokens[0].tolist(), "packed": packed, "weights": digests(model)}
            results[job["name"]] = result | {"error": None}
        except Exception as error:
            traceback.print_exc()
            results[job["name"]] = {"error": f"{type(error).__name__}: {error}"[:500]}
    save_file(logits, path.with_name("logits.safetensors"))
    path.with_name("results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where clients print
    for line in sys.stdin:
        main(Path(line.rstrip("\n")))
        print("done", file=answers, flush=True)
