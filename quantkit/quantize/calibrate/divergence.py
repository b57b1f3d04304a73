"""KL divergence over the whole vocabulary, from final hidden states, some tokens at a time.

Measurements on held-out text use temperature 1. A loss may have another temperature T (Hinton et al. 2015,
arXiv:1503.02531, section 2): logits are divided by T and divergences multiplied by T².
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from quantkit.quantize.calibrate.backward import chunk_tokens

Logits = Callable[[Tensor], Tensor]  # from hidden states `[tokens, hidden]`


def of_tokens(
    teacher: Logits, student: Logits, pairs: Iterable[tuple[Tensor, Tensor]], vocabulary: int
) -> Tensor:
    """Return the KL divergence of each token in nats, `[tokens]` in float64 on the CPU. teacher, student:
    functions from states to logits. pairs: (teacher's, student's) final hidden states
    `[batch, tokens, hidden]`."""
    found, size = [], chunk_tokens(vocabulary)
    with torch.no_grad():
        for both in pairs:
            parts = (states.flatten(0, 1).split(size) for states in both)
            found += [kl(teacher(a), student(b)).cpu() for a, b in zip(*parts, strict=True)]
    return torch.cat(found).double()


def kl(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the KL divergence of each prediction in nats, `[...]` in float32, from logits
    `[..., vocabulary]`."""
    expected = torch.log_softmax(teacher.float() / temperature, -1)
    found = torch.log_softmax(student.float() / temperature, -1)
    return of_log_probs(expected, found)


def of_log_probs(expected: Tensor, found: Tensor) -> Tensor:
    """Return the KL divergence `[...]` of each prediction in nats, from log-probabilities
    `[..., vocabulary]`."""
    return (expected - found).mul_(expected.exp()).sum(-1)
