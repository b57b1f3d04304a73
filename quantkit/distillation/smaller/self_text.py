"""Text that the teacher writes itself: what it is trained to say again needs no one else's text.

Sequences are sampled from the bare distribution (temperature 1, nothing cut off), in batches, with a KV cache
(data-free distillation as in LLM-QAT, Liu et al. 2023, arXiv 2305.17888, section 3.1). Each begins with the
token that begins texts, or parts them, and goes on behind the end of a text as the teacher was trained to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.evaluation.whole_model import load_model
from quantkit.models.checkpoint import Checkpoint

BATCH = 32  # sequences written side by side: part of what decides the text


def write(
    checkpoint: Checkpoint,
    samples: int,
    seqlen: int,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    listen: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """int64 `[samples, seqlen]`, the same for the same seed. The teacher is held whole meanwhile.

    Raises QuantkitError when it does not fit the memory (exit code 5), or has no token to begin with.
    """
    first = beginning(checkpoint)
    model = load_model(checkpoint, dtype, device, BATCH * seqlen)
    how = transformers.GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=seqlen - 1,
        max_new_tokens=seqlen - 1,
        eos_token_id=None,
        pad_token_id=first,
        use_cache=True,
    )
    model.generation_config = transformers.GenerationConfig()  # nothing of its own counts
    found = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        for start in range(0, samples, BATCH):
            listen(start, samples)
            prompt = torch.full((min(BATCH, samples - start), 1), first, device=device)
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=how)
            found.append(out.cpu())
    listen(samples, samples)
    return torch.cat(found)


def beginning(checkpoint: Checkpoint) -> int:
    """The token that begins a text, or else parts two. Raises QuantkitError where there is neither."""
    tokenizer = checkpoint.tokenizer
    marks = (tokenizer.bos_token_id, tokenizer.eos_token_id, checkpoint.text_config.bos_token_id)
    first = next((mark for mark in marks if mark is not None), None)
    if first is None:
        raise QuantkitError(
            f"{checkpoint.source} has no token that begins a text, so it cannot write one by itself",
            hint="leave --self-text out and give it text with --calibration",
            exit_code=UNSUPPORTED,
        )
    return first
