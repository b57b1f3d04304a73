"""Run by the client environment's python: what an independent client computes with checkpoints.

usage: load_gptq.py JOBS.json. For each job `{name, folder, loader, dtype}` the logits `[tokens, vocabulary]`
go to `logits.safetensors` beside JOBS.json, and everything else to `results.json`; a checkpoint that the
client cannot load is a result, too. quantkit is not imported here.
"""

import json
import os
import sys
import traceback
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the first forward otherwise compiles for many seconds
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from gptqmodel import BACKEND, GPTQModel
from gptqmodel.nn_modules.qlinear import BaseQuantLinear
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPTQConfig


def load(folder: str, loader: str, dtype: torch.dtype) -> torch.nn.Module:
    """`transformers` goes through optimum, `gptqmodel` is GPTQModel's own loader; one plain torch kernel."""
    if loader == "gptqmodel":
        return GPTQModel.load(folder, backend=BACKEND.GPTQ_TORCH, dtype=dtype, device="cpu").model
    bits = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]["bits"]
    config = GPTQConfig(bits=bits, backend="gptq_torch")  # the rest is taken from config.json
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)


@torch.no_grad()
def main(path: Path) -> None:
    torch.set_num_threads(1)
    request = json.loads(path.read_text())
    ids = torch.tensor([request["ids"]])
    logits, results = {}, {}
    for job in request["jobs"]:
        try:
            model = load(job["folder"], job["loader"], getattr(torch, job["dtype"]))
            logits[job["name"]] = model(ids).logits[0].float()
            tokens = ids[:, : request["prompt"]]
            for _ in range(request["new_tokens"]):
                best = model(tokens).logits[0, -1].argmax()
                tokens = torch.cat([tokens, best.view(1, 1)], 1)
            packed = sum(isinstance(module, BaseQuantLinear) for module in model.modules())
            results[job["name"]] = {"tokens": tokens[0].tolist(), "packed": packed, "error": None}
        except Exception as error:
            traceback.print_exc()
            results[job["name"]] = {"error": f"{type(error).__name__}: {error}"[:500]}
    save_file(logits, path.with_name("logits.safetensors"))
    path.with_name("results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
