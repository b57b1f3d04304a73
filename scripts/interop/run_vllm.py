"""Run by the vLLM environment's python: several models, one prompt. quantkit is not imported.

usage: run_vllm.py JOBS.json with `{ids, new_tokens, top, jobs: [{folder, dtype, result}]}`. Leaves in
the file `result`: for every prompt token but the first the log probabilities of the `top` likeliest tokens,
and the greedy continuation; or the error. Each model has a process of its own, forked after vLLM is imported:
the engine does not give its memory back. A single model needs no fork.
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


def generate(request: dict, folder: str, dtype: str) -> dict:
    """Return log probabilities of the prompt and the tokens that vLLM continues it with."""
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


def main(path: Path) -> None:
    request = json.loads(path.read_text())
    installed = {each.metadata["Name"].lower() for each in metadata.distributions()}
    names = {"vllm", "vllm-cpu", "torch", "transformers"} & installed
    versions = {name: metadata.version(name) for name in sorted(names)}
    for job in request["jobs"]:
        if request["jobs"][1:] and (process := os.fork()):
            os.waitpid(process, 0)
            continue
        try:
            result = generate(request, job["folder"], job["dtype"])
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        Path(job["result"]).write_text(json.dumps(result | {"versions": versions}))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the engine's threads would keep the process for another ten seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, metavar="JOBS.json")
    main(parser.parse_args().path)
