"""Whether strategies wrote the same: tokens compared one by one, and where they part, whether it was a tie.

Padded, paged and single sequences add the same numbers in other orders, so two tokens whose logits differ by
less than that rounding may change places; everything after such a tie is another text, and no error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quantkit.evaluation.generate import first_difference

TIE = 1e-4  # of the largest logit, in float32: a hundred times what the order of sums changes
Answers = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Proof:
    """Answers of one strategy against the first one's. ties: those that part where two tokens are equally
    likely; differing: those that part elsewhere, at most by `gap` of the largest logit, None where one is
    longer. holds: whether none differ."""

    strategy: str
    against: str
    requests: int
    alike: int
    ties: int
    differing: int
    gap: float | None
    holds: bool


def compare(model: nn.Module, prompts: Answers, answers: Mapping[str, Answers]) -> list[Proof]:
    """Every strategy's answers against the first one's. model: the float32 one that wrote them."""
    (first, expected), *others = answers.items()
    found = []
    for name, written in others:
        rows = list(zip(prompts, expected, written, strict=True))
        gaps = [_gap(model, *row, place) for row in rows if (place := first_difference(*row[1:])) is not None]
        differing = sum(gap > TIE for gap in gaps)
        alike, ties = len(rows) - len(gaps), len(gaps) - differing
        most = max(gaps, default=0.0)
        gap = most if most < math.inf else None  # JSON has no infinity
        found.append(Proof(name, first, len(rows), alike, ties, differing, gap, holds=not differing))
    return found


@torch.no_grad()
def _gap(model: nn.Module, prompt: Sequence[int], a: Sequence[int], b: Sequence[int], place: int) -> float:
    """How far the less likely of both tokens is below the likeliest, as a share of the largest logit."""
    if place >= min(len(a), len(b)):
        return math.inf  # one is longer: no tie explains that
    logits = model(torch.tensor([[*prompt, *a[:place]]], device=model.device)).logits[0, -1].float()
    worst = min(logits[a[place]].item(), logits[b[place]].item())
    return (logits.max().item() - worst) / logits.abs().max().item()
