"""KL(teacher ‖ student) of whole vocabularies, from final hidden states, some tokens at a time.

What decides has temperature 1 and held-out text; the loss has one of its own (Hinton et al. 2015,
arXiv:1503.02531, section 2: logits divided by T, the divergence times T², so that gradients keep their size).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from quantkit.quantize.calibrate.backward import chunk_tokens

Logits = Callable[[Tensor], Tensor]  # of hidden states `[tokens, hidden]`


def mean(teacher: Logits, student: Logits, pairs: Iterable[tuple[Tensor, Tensor]], vocabulary: int) -> float:
    """Mean over all tokens of `pairs` of final hidden states `[batch, tokens, hidden]`, teacher's and
    student's; in nats."""
    total, tokens = 0.0, 0
    with torch.no_grad():
        for theirs, ours in pairs:
            for a, b in chunks(theirs, ours, vocabulary):
                each = of_logits(teacher(a), student(b), 1.0)
                total += each.cpu().double().sum().item()
                tokens += len(each)
    return total / tokens


def chunks(theirs: Tensor, ours: Tensor, vocabulary: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of both, `[tokens, hidden]`, whose logits fit CHUNK_BYTES."""
    size = chunk_tokens(vocabulary)
    yield from zip(theirs.flatten(0, 1).split(size), ours.flatten(0, 1).split(size), strict=True)


def of_logits(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Of every token, float32 `[tokens]`, for logits `[tokens, vocabulary]`."""
    expected = torch.log_softmax(teacher.float() / temperature, -1)
    found = torch.log_softmax(student.float() / temperature, -1)
    return (expected.exp() * (expected - found)).sum(-1) * temperature**2
