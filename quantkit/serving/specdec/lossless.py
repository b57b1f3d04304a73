"""Proof that a draft does not change the text: greedy text is token by token the target's own.

A pass over several tokens rounds otherwise than one over a single token, so texts may part at two tokens with
nearly equal logits. Their difference is compared with the change of the target's logits by the length of a
pass.
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

    prompt: int64 `[1, tokens]`. index: of the new tokens. token, expected: the drafted text's and its own,
    None where one of the texts ends there. margin: how much larger the logit of its own choice is, token by
    token. noise: the largest difference between its logits token by token and in one pass over the same text.
    tie: whether rounding explains the difference, since both logits may move by the noise.
    """
    index = first_difference(own, drafted)
    if index is None:
        return None
    single = _one_by_one(target, prompt, own)
    noise = (_at_once(target, prompt, own) - single).abs().max().item()
    if index >= min(len(own), len(drafted)):  # one text ended: rounding cannot explain that
        found = {"token": None, "expected": None, "margin": None, "tie": False}
    else:
        margin = (single[index, own[index]] - single[index, drafted[index]]).item()
        found = {"token": drafted[index], "expected": own[index], "margin": margin}
        found["tie"] = margin <= 2 * noise
    return {"index": index, "noise": noise} | found


def _at_once(model: nn.Module, prompt: Tensor, ids: Sequence[int]) -> Tensor:
    """Return the logits that choose each new id, float32 on the CPU `[new tokens, vocabulary]`.

    All ids go through one pass."""
    whole = torch.cat([prompt, torch.tensor([list(ids)], device=prompt.device)], 1)
    out = model(input_ids=whole, use_cache=False).logits[0, prompt.shape[1] - 1 : -1]
    return out.to("cpu").float()


def _one_by_one(model: nn.Module, prompt: Tensor, ids: Sequence[int]) -> Tensor:
    """Return the logits of `_at_once` as the target alone computes them: the prompt, then a token a pass."""
    found, given, cache = [], prompt, None
    for token in ids:
        out = model(input_ids=given, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits[0, -1].to("cpu").float())
        given = torch.tensor([[token]], device=prompt.device)
    return torch.stack(found)
