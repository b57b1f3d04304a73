"""Run by a python with nvidia-modelopt and transformers: writes what ModelOpt exports of a random Llama.

usage: modelopt_tensors.py FILE. Names are ALGO.LINEAR.PART, and LINEAR.weight for the original. NVFP4 also
has the values that ModelOpt decodes. The metadata hold both configurations of each algorithm.
`tests/data/modelopt.safetensors` is such a file.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

CONFIGS = ("FP8_DEFAULT", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4_DEFAULT", "W4A16_NVFP4", "MXFP8_DEFAULT")
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")


def model(hidden: int, intermediate: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    return LlamaForCausalLM(config).bfloat16().eval()


def exported(original: LlamaForCausalLM, config: str, cache: bool = False) -> tuple[dict, dict]:
    """The tensors, and both configurations."""
    how = copy.deepcopy(getattr(mtq, f"{config}_CFG"))
    if cache:
        how = mtq.update_quant_cfg_with_kv_cache_quant(how, mtq.FP8_KV_CFG["quant_cfg"])
    found = mtq.quantize(copy.deepcopy(original), how, lambda m: m(torch.arange(32)[None]))
    with tempfile.TemporaryDirectory() as place, torch.inference_mode():
        export_hf_checkpoint(found, export_dir=place)
        read = {
            name: json.loads((Path(place) / name).read_text())
            for name in ("config.json", "hf_quant_config.json")
        }
        told = {"config": read["config.json"]["quantization_config"], "file": read["hf_quant_config.json"]}
        return load_file(Path(place) / "model.safetensors"), told


def decoded(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    rows, half = parts["weight"].shape
    packed = NVFP4QTensor(torch.Size((rows, 2 * half)), torch.float32, parts["weight"])
    scales = {"scale": parts["weight_scale"], "double_scale": parts["weight_scale_2"]}
    return packed.dequantize(dtype=torch.float32, block_sizes={-1: 16}, **scales)


def main(path: str) -> None:
    small, large = model(64, 96), model(128, 256)
    block = "model.layers.0."
    kept = {f"{name}.weight": small.get_submodule(block + name).weight.detach() for name in LINEARS}
    told = {}
    jobs = [(small, config, LINEARS, False) for config in CONFIGS]
    jobs += [
        (large, "FP8_2D_BLOCKWISE_WEIGHT_ONLY", ("mlp.down_proj",), False),
        (small, "FP8_DEFAULT", LINEARS[1:3], True),
    ]
    for original, config, linears, cache in jobs:
        tensors, found = exported(original, config, cache)
        algo = found["config"]["quant_algo"] + ("+KV" if cache else "")
        told[algo] = json.dumps(found)
        for name in linears:
            parts = {
                part.removeprefix(f"{block}{name}."): tensor
                for part, tensor in tensors.items()
                if part.startswith(f"{block}{name}.")
            }
            if "weight_scale_2" in parts and name.endswith("k_proj"):
                parts["values"] = decoded(parts)
            kept |= {
                f"{algo}.{name}.{part}": tensor.contiguous()
                for part, tensor in parts.items()
                if not cache or part[0] in "kv"
            }
    save_file(kept, path, metadata={"configurations": json.dumps(told)})


if __name__ == "__main__":
    main(sys.argv[1])
