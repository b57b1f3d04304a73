"""Run by the vLLM environment's python: several models, one prompt. quantkit is not imported.

usage: run_vllm.py JOBS.json with `{ids, new_tokens, top, as_is, jobs: [{folder, dtype, result}]}`. Leaves in
the file `result`: for every prompt token but the first the log probabilities of the `top` likeliest tokens,
and the greedy continuation; or the error. Each model has a process of its own, forked after vLLM is imported:
the engine does not give its memory back. A single model needs no fork.

vLLM builds its int4 product for AVX-512 only. Where the machine has none, a literal one in torch stands in
for it, and the result says so: what is tested then is how vLLM reads and repacks a checkpoint.
vLLM takes int4 experts only where there are AMX tiles, though its product of them has code for AVX-512, too:
where there are none it is told to take them all the same, and the result says so. `as_is`: neither is done.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from importlib import metadata
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def int4_product(input, q_weight, scales, zeros, bias, pack_factor, isa_hint):
    """What `cpu_gemm_wna16` computes: `input [..., in]` times codes as vLLM repacked them.

    q_weight int32 `[out / 16, in * 2]`: blocks of 16 outputs, two words an input, little-endian nibbles.
    scales `[groups, out]`; zeros int32 `[groups, out / 8]`, or None for 8 everywhere.
    """
    import torch

    def nibbles(words: torch.Tensor) -> torch.Tensor:
        return (words[..., None] >> torch.arange(0, 32, 4) & 15).flatten(-2).float()

    groups, out_features = scales.shape
    in_features = input.shape[-1]
    words = q_weight.view(out_features // 16, in_features, 2).permute(1, 0, 2).reshape(in_features, -1)
    zero = 8.0 if zeros is None else nibbles(zeros)[:, None]
    codes = nibbles(words).view(groups, in_features // groups, out_features)
    weight = ((codes - zero) * scales.float()[:, None]).view(in_features, out_features)
    output = input.float() @ weight
    return (output if bias is None else output + bias.float()).to(input.dtype)


def generate(request: dict, folder: str, dtype: str) -> dict:
    """What vLLM computes with one model."""
    from vllm import LLM, SamplingParams

    model = LLM(
        folder,
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=1,
        disable_log_stats=True,
    )
    sampling = SamplingParams(
        max_tokens=request["new_tokens"], temperature=0, prompt_logprobs=request["top"], detokenize=False
    )
    output = model.generate([{"prompt_token_ids": request["ids"]}], sampling, use_tqdm=False)[0]
    prompt = [
        {str(token): value.logprob for token, value in likely.items()}
        for likely in output.prompt_logprobs[1:]
    ]
    return {"prompt_logprobs": prompt, "tokens": list(output.outputs[0].token_ids)}


def allow(as_is: bool) -> dict[str, bool]:
    """Stand in for what this machine lacks, unless `as_is`; whether it has its own product and tiles."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {"own_product": True, "tiles": True}
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt4

    own_product = hasattr(torch.ops._C, "cpu_gemm_wna16")
    tiles = torch.cpu._is_amx_tile_supported()
    if not own_product and not as_is:
        _custom_ops.cpu_gemm_wna16 = int4_product
    if not tiles and not as_is:
        CPUExpertsInt4._supports_current_device = staticmethod(lambda: True)
    return {"own_product": own_product, "tiles": tiles}


def main(path: Path) -> None:
    request = json.loads(path.read_text())
    common = allow(request["as_is"])
    installed = {each.metadata["Name"].lower() for each in metadata.distributions()}
    names = {"vllm", "vllm-cpu", "torch", "transformers"} & installed
    common["versions"] = {name: metadata.version(name) for name in sorted(names)}
    for job in request["jobs"]:
        if request["jobs"][1:] and (process := os.fork()):
            os.waitpid(process, 0)
            continue
        try:
            result = generate(request, job["folder"], job["dtype"])
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        Path(job["result"]).write_text(json.dumps(result | common))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the engine's threads would keep the process for another ten seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, metavar="JOBS.json")
    main(parser.parse_args().path)
