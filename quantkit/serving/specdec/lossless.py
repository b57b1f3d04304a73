"""Checks that a draft does not change the text: greedy text must equal the target's own, token by token.

A pass over several tokens rounds differently than passes over single tokens. So two texts may differ where
two tokens have nearly equal logits. The difference of these logits is compared with the change that the
length of a pass causes in the target's logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.evaluation.generate import first_difference


@torch.no_grad()
def parting(
    target: nn.Module, prompt: Tensor, own: Sequence[int], drafted: Sequence[int]
) -> dict[str, Any] | None:
    """Return the first difference between a drafted text and the target's own, or None.

    prompt: int64 `[1, tokens]`. own, drafted: new token ids. index: position of the first difference among
    the new tokens. token, expected: ids of the drafted and the own text there; None if one text ends there.
    margin: logit of `expected` minus logit of `token`, computed token by token. noise: largest difference of
    the target's logits at that position between token by token and one pass. tie: margin <= 2 · noise.
    """
    index = first_difference(own, drafted)
    if index is None:
        return None
    single = _one_by_one(target, prompt, own)
    at = min(index, len(own) - 1)  # another position may be noisier
    noise = (_at_once(target, prompt, own)[at] - single[at]).abs().max().item()
    if index >= min(len(own), len(drafted)):  # one text ended: rounding cannot explain that
        found = {"token": None, "expected": None, "margin": None, "tie": False}
    else:
        margin = (single[index, own[index]] - single[index, drafted[index]]).item()
        found = {"token": drafted[index], "expected": own[index], "margin": margin}
        found["tie"] = margin <= 2 * noise
    return {"index": index, "noise": noise} | found


def _at_once(model: nn.Module, prompt: Tensor, ids: Sequence[int]) -> Tensor:
    """Return the logits that predict each new id, from one pass over all: float32 `[new tokens, vocabulary]`
    on the CPU."""
    whole = torch.cat([prompt, torch.tensor([list(ids)], device=prompt.device)], 1)
    out = model(input_ids=whole, use_cache=False).logits[0, prompt.shape[1] - 1 : -1]
    return out.to("cpu").float()


def _one_by_one(model: nn.Module, prompt: Tensor, ids: Sequence[int]) -> Tensor:
    """Return the logits of `_at_once`, computed by a pass over the prompt and then one pass per token."""
    found, given, cache = [], prompt, None
    for token in ids:
        out = model(input_ids=given, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits[0, -1].to("cpu").float())
        given = torch.tensor([[token]], device=prompt.device)
    return torch.stack(found)
