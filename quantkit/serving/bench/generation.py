"""Greedy generation by transformers, with the time of every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn

from quantkit.serving.engines.transformers import Clock, Ticks


@torch.no_grad()
def run(
    model: nn.Module, prompts: Sequence[Sequence[int]], tokens: int, clock: Clock
) -> tuple[list[list[int]], list[float], Any]:
    """Continue prompts, padded on the left; return continuations `[prompts, tokens]`, the seconds of each
    step (the first is the prefill), and the cache."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    # without the checkpoint's own settings, such as its end of text: lengths are exact
    model.generation_config = transformers.GenerationConfig()
    settings = transformers.GenerationConfig(
        max_new_tokens=tokens, do_sample=False, use_cache=True, pad_token_id=0, return_dict_in_generate=True
    )
    ids, mask = ids.to(model.device), mask.to(model.device)
    ticks = Ticks(clock)
    stopping = transformers.StoppingCriteriaList([ticks])
    out = model.generate(ids, attention_mask=mask, generation_config=settings, stopping_criteria=stopping)
    seconds = [after - before for before, after in zip(ticks.times, ticks.times[1:], strict=False)]
    return out.sequences[:, width:].tolist(), seconds, out.past_key_values
