"""Tokens a second of a checkpoint in vLLM, by number of sequences at once: vllm_rates.py REQUEST.json.

Runs in vLLM's python. The result is written beside the request, as REQUEST.rates.json.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("request", type=Path)
    path = parser.parse_args(given).request
    import vllm

    request = json.loads(path.read_text())
    prompt_tokens, new_tokens, batches = request["prompt"], request["new"], request["batches"]
    model = vllm.LLM(
        request["model"],
        skip_tokenizer_init=True,
        max_model_len=prompt_tokens + new_tokens,
        max_num_seqs=max(batches),
        enable_prefix_caching=False,
        disable_log_stats=True,
        **request["options"],
    )
    vocabulary = model.llm_engine.model_config.get_vocab_size()
    choose = random.Random(0).randrange

    def seconds(batch: int, new: int) -> float:
        prompts = [
            {"prompt_token_ids": [choose(vocabulary) for _ in range(prompt_tokens)]} for _ in range(batch)
        ]
        sampling = vllm.SamplingParams(max_tokens=new, ignore_eos=True, temperature=0, detokenize=False)
        began = time.perf_counter()
        model.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - began

    rates = {}
    for batch in batches:
        seconds(batch, new_tokens)  # the first pass compiles
        first, all_tokens = (min(seconds(batch, new) for _ in range(3)) for new in (1, new_tokens))
        rates[f"tokens/s at {batch}"] = batch * (new_tokens - 1) / (all_tokens - first)
        rates[f"prompt tokens/s at {batch}"] = batch * prompt_tokens / first
    path.with_suffix(".rates.json").write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
