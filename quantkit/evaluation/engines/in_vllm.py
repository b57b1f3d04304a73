"""Runs a checkpoint in vLLM; see wire.py. Options are those of `vllm.LLM`.

vLLM returns the likeliest tokens alone. This program keeps the logits that the model computes for the log
probabilities of the prompt, with vLLM's own head.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # a window may fill the context
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def load(request: dict) -> tuple[Any, Any]:
    """Return a function from ids to logits, and one that returns facts; see wire.py."""
    import numpy as np
    import vllm

    length, kept = max(map(len, request["windows"])) + 1, []
    options: dict[str, Any] = {"enforce_eager": True, "enable_prefix_caching": False, **request["options"]}
    model = vllm.LLM(
        request["model"],
        trust_remote_code=request["trust_remote_code"],
        skip_tokenizer_init=True,
        max_model_len=length,
        max_num_batched_tokens=length,  # a whole window at once
        max_num_seqs=1,
        disable_log_stats=True,
        **options,
    )

    def listen(inner: Any) -> list[tuple[str, int]]:
        """Keep the logits of all positions; return the most frequent kernels, "" for modules without one."""
        compute_logits = inner.compute_logits

        def keeping(hidden: Any, *arguments: Any, **named: Any) -> Any:
            logits = compute_logits(hidden, *arguments, **named)
            if len(logits) > 1:  # a single row is that of the token to come
                kept.append(logits.float().cpu().numpy())
            return logits

        inner.compute_logits = keeping
        return Counter(map(_kernel, inner.modules())).most_common(2)

    ranked = model.apply_model(listen)[0]
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)

    def compute(ids: list[int]) -> Any:
        kept.clear()
        model.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        logits = np.concatenate(kept)
        assert len(logits) == len(ids) - 1, f"vLLM computed logits of {len(logits)} of {len(ids) - 1} tokens"
        return logits

    def facts() -> dict:
        dtype = str(model.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")
        kernels = next((name for name, _ in ranked if name), None)
        return {"version": vllm.__version__, "kernels": kernels, "dtype": dtype}

    return compute, facts


def _kernel(module: Any) -> str:
    """Return the classes of a linear's method, scheme and kernel; "" for other modules."""
    method = getattr(module, "quant_method", None)
    if method is None:
        return ""
    scheme = getattr(module, "scheme", None)
    kernel = next((k for holder in (scheme, method) if (k := getattr(holder, "kernel", None))), None)
    return " ".join(type(each).__name__ for each in (method, scheme, kernel) if each is not None)
