"""Whether strategies wrote the same: tokens compared one by one, and where they part, whether it was a tie.

Padded, paged and single sequences add the same numbers in other orders, so two tokens whose logits differ by
less than that rounding may change places; everything after such a tie is another text, and no error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quantkit.evaluation.generate import first_difference

TIE = 1e-4  # of the largest logit, in float32: a hundred times what the order of sums changes


@dataclass(frozen=True)
class Proof:
    """Answers of one strategy against the first one's. ties: those that part where two tokens are equally
    likely; differing: those that part elsewhere, at most by `gap` of the largest logit."""

    strategy: str
    against: str
    requests: int
    alike: int
    ties: int
    differing: int
    gap: float

    @property
    def holds(self) -> bool:
        return self.differing == 0


def compare(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    answers: Mapping[str, Sequence[Sequence[int]]],
) -> list[Proof]:
    """Every strategy's answers against the first one's. model: the float32 one that wrote them."""
    first, *others = answers
    return [_against(model, prompts, first, answers[first], name, answers[name]) for name in others]


def _against(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    first: str,
    expected: Sequence[Sequence[int]],
    name: str,
    found: Sequence[Sequence[int]],
) -> Proof:
    gaps = []
    for prompt, a, b in zip(prompts, expected, found, strict=True):
        place = first_difference(a, b)
        if place is not None:
            gaps.append(_gap(model, [*prompt, *a[:place]], a, b, place))
    differing = sum(gap > TIE for gap in gaps)
    return Proof(
        strategy=name,
        against=first,
        requests=len(prompts),
        alike=len(prompts) - len(gaps),
        ties=len(gaps) - differing,
        differing=differing,
        gap=max(gaps, default=0.0),
    )


def _gap(model: nn.Module, before: list[int], a: Sequence[int], b: Sequence[int], place: int) -> float:
    """How far the less likely of both tokens is below the likeliest, as a share of the largest logit."""
    if place >= min(len(a), len(b)):
        return float("inf")  # one is longer: no tie explains that
    with torch.no_grad():
        logits = model(torch.tensor([before], device=model.device)).logits[0, -1].float()
    worst = min(logits[a[place]].item(), logits[b[place]].item())
    return (logits.max().item() - worst) / logits.abs().max().item()
