"""Greedy generation by transformers, every token timed: of checkpoints, and of padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn

from quantkit.serving.bench.machine import Clock


class _Ticks(transformers.StoppingCriteria):
    """Notes the time after every token, and never stops."""

    def __init__(self, clock: Clock):
        self.clock, self.times = clock, [clock()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(self.clock())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@torch.no_grad()
def run(
    model: nn.Module, prompts: Sequence[Sequence[int]], tokens: int, clock: Clock
) -> tuple[list[list[int]], list[float], Any]:
    """Continuations `[prompts, tokens]` of prompts that are padded on the left, the seconds that each token
    took, of which the first are the prefill's, and the cache."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    # nothing that a checkpoint recommends, its end of text least of all: lengths are exact
    model.generation_config = transformers.GenerationConfig()
    settings = transformers.GenerationConfig(
        max_new_tokens=tokens, do_sample=False, use_cache=True, pad_token_id=0, return_dict_in_generate=True
    )
    ids, mask = ids.to(model.device), mask.to(model.device)
    ticks = _Ticks(clock)
    stopping = transformers.StoppingCriteriaList([ticks])
    out = model.generate(ids, attention_mask=mask, generation_config=settings, stopping_criteria=stopping)
    seconds = [after - before for before, after in zip(ticks.times, ticks.times[1:], strict=False)]
    return out.sequences[:, width:].tolist(), seconds, out.past_key_values
