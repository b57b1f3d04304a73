"""KL divergence over the whole vocabulary, from final hidden states, some tokens at a time.

Measurements on held-out text use temperature 1. A loss may have another temperature T (Hinton et al. 2015,
arXiv:1503.02531, section 2): logits are divided by T and divergences multiplied by T².
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from quantkit.grids.grid import by_rows
from quantkit.quantize.calibrate.backward import chunk_tokens

Logits = Callable[[Tensor], Tensor]  # from hidden states `[tokens, hidden]`


def of_tokens(
    teacher: Logits, student: Logits, pairs: Iterable[tuple[Tensor, Tensor]], vocabulary: int
) -> Tensor:
    """Return the KL divergence of each token in nats, `[tokens]` in float64 on the CPU. teacher, student:
    functions from states to logits. pairs: (teacher's, student's) final hidden states
    `[batch, tokens, hidden]`."""
    divergences, size = [], chunk_tokens(vocabulary)
    with torch.no_grad():
        for both in pairs:
            chunks = (states.flatten(0, 1).split(size) for states in both)
            divergences += [kl(teacher(a), student(b)).cpu() for a, b in zip(*chunks, strict=True)]
    return torch.cat(divergences).double()


def of_logits(teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
    """Return the KL divergence of each token in nats, and 1.0 where both predictions are the same token, else
    0.0, float32 `[tokens]`, from logits `[tokens, vocabulary]`.

    As many tokens at a time as fit the cache: float32 copies of all logits would cost more in page faults
    than the work itself.
    """

    def work(*logits: Tensor) -> Tensor:
        teacher, student = (torch.log_softmax(side.float(), -1) for side in logits)
        same = teacher.argmax(-1) == student.argmax(-1)
        return torch.stack([of_log_probs(teacher, student), same.float()], 1)

    return by_rows(work, torch.empty(len(student), 2, device=student.device), teacher, student).unbind(1)


def nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood of each target id in nats, float32 `[tokens]`, from logits
    `[tokens, vocabulary]`; in pieces, as `of_logits`."""

    def work(logits: Tensor, targets: Tensor) -> Tensor:
        return -torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])

    return by_rows(work, torch.empty(len(logits), 1, device=logits.device), logits, targets)[:, 0]


def kl(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the KL divergence in nats, `[...]` in float32, from logits `[..., vocabulary]`."""
    return of_log_probs(*(torch.log_softmax(side.float() / temperature, -1) for side in (teacher, student)))


def of_log_probs(teacher: Tensor, student: Tensor) -> Tensor:
    """Return the KL divergence in nats, `[...]`, from log-probabilities `[..., vocabulary]`."""
    return (teacher - student).mul_(teacher.exp()).sum(-1)
