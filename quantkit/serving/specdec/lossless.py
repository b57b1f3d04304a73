"""Proof that a draft changed nothing but the time.

Greedy: token by token the target's own text. A pass over several tokens rounds otherwise than one over a
single token, so where two tokens are all but equal the texts may part: how close they were stands beside how
far the target's own logits move with the length of a pass.

Sampled: each token's place in the target's distribution given the text before it, `u = P(tokens before it in
some order) + U · P(it)` with U uniform, is uniform and independent of all others exactly if the text follows
the target's distribution (Rosenblatt 1952, "Remarks on a Multivariate Transformation"). The order is by what
the draft would have more of than the target, so that a rule which accepts too much shows first. χ² of the
counts in equal bins; works for any vocabulary, since no token needs to be drawn twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.evaluation.generate import first_difference

BINS, PER_BIN = 20, 20  # at most; tokens expected in each at least
SIGNIFICANT = 1e-3  # below, the distribution is another: so it seems by chance once in a thousand proofs


@dataclass(frozen=True)
class Parting:
    """The first token in which drafted text leaves the target's own. index: of the new tokens. token,
    expected: the drafted text's and its own, None where one of the texts ends there.

    margin: by how much the target, asked token by token, prefers its own choice (logits), None where no
    logits say it. noise: the largest difference between its logits token by token and in one pass over the
    same text.
    """

    prompt: int
    k: int
    index: int
    token: int | None
    expected: int | None
    margin: float | None
    noise: float

    @property
    def tie(self) -> bool:
        """Whether rounding explains it: both logits may move by the noise."""
        return self.margin is not None and self.margin <= 2 * self.noise


@dataclass(frozen=True)
class Greedy:
    """Drafted texts against the target's own: how many of each, tokens compared and alike up to where texts
    parted, and where they did."""

    texts: int
    equal: int
    tokens: int
    partings: list[Parting]
    kind: str = "greedy"

    @property
    def alike(self) -> bool:
        """Whether rounding explains every parting."""
        return all(found.tie for found in self.partings)


@dataclass(frozen=True)
class Uniformity:
    """χ² of `tokens` in `bins`, and the probability of one as large. overlap: the mean of Σ min(p, q) over
    the vocabulary, which is α (Leviathan et al. 2023, theorem 3.5); None without a draft's distribution."""

    tokens: int
    bins: int
    chi_square: float
    p_value: float
    overlap: float | None
    kind: str = "sampled"

    @property
    def alike(self) -> bool:
        """Whether the text may follow the target's distribution."""
        return self.p_value >= SIGNIFICANT


@torch.no_grad()
def parting(
    target: nn.Module, prompt: Tensor, own: Sequence[int], drafted: Sequence[int], place: tuple[int, int]
) -> Parting | None:
    """Where the drafted text leaves the target's own; prompt int64 `[1, tokens]`, place: prompt and k."""
    index = first_difference(own, drafted)
    if index is None:
        return None
    single = _one_by_one(target, prompt, own)
    noise = (logits(target, prompt, own) - single).abs().max().item()
    if index >= min(len(own), len(drafted)):  # one ended: no choice of the target explains that
        return Parting(*place, index, None, None, None, noise)
    margin = (single[index, own[index]] - single[index, drafted[index]]).item()
    return Parting(*place, index, drafted[index], own[index], margin, noise)


@torch.no_grad()
def logits(model: nn.Module, prompt: Tensor, ids: Sequence[int]) -> Tensor:
    """What chose each of the new ids, float32 on the CPU `[new tokens, vocabulary]`, in one pass."""
    whole = torch.cat([prompt, torch.tensor([list(ids)], device=prompt.device)], 1)
    out = model(input_ids=whole, use_cache=False).logits[0, prompt.shape[1] - 1 : -1]
    return out.to("cpu").float()


def _one_by_one(model: nn.Module, prompt: Tensor, ids: Sequence[int]) -> Tensor:
    """The same as the target alone computes it: the prompt, then a token a pass."""
    found, given, cache = [], prompt, None
    for token in ids:
        out = model(input_ids=given, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits[0, -1].to("cpu").float())
        given = torch.tensor([[token]], device=prompt.device)
    return torch.stack(found)


@torch.no_grad()
def uniformity(
    texts: Iterable[tuple[Tensor, Sequence[int]]],
    target: nn.Module,
    draft: nn.Module | None,
    temperature: float,
    seed: int,
) -> Uniformity:
    """Whether sampled texts, (prompt, new ids) each, follow the target's distribution at that temperature."""
    generator = torch.Generator().manual_seed(seed)
    places: list[Tensor] = []
    overlaps: list[Tensor] = []
    for prompt, ids in texts:
        p = (logits(target, prompt, ids).double() / temperature).softmax(-1)
        q = p if draft is None else (logits(draft, prompt, ids).double() / temperature).softmax(-1)
        places.append(place(p, q, torch.tensor(list(ids)), generator))
        overlaps.append(torch.minimum(p, q).sum(-1))
    found = torch.cat(places)
    overlap = torch.cat(overlaps).mean().item() if draft is not None else None
    bins = max(2, min(BINS, len(found) // PER_BIN))
    return Uniformity(len(found), bins, *chi_square(torch.histc(found, bins, 0, 1)), overlap)


def place(p: Tensor, q: Tensor, ids: Tensor, generator: torch.Generator) -> Tensor:
    """u of every token: float64 `[tokens]` in [0, 1). p, q: of target and draft, `[tokens, vocabulary]`.

    Tokens are ordered by q / p, largest first; without a draft, q = p, by number.
    """
    order = (q.log() - p.log()).nan_to_num(0.0).argsort(dim=-1, descending=True, stable=True)
    sorted_p = p.gather(-1, order)
    before = sorted_p.cumsum(-1) - sorted_p
    rank = (order == ids[:, None]).to(torch.int8).argmax(-1, keepdim=True)
    own, below = sorted_p.gather(-1, rank)[:, 0], before.gather(-1, rank)[:, 0]
    return (below + torch.rand(len(ids), generator=generator, dtype=torch.float64) * own).clamp(0, 1 - 1e-12)


def chi_square(counts: Tensor) -> tuple[float, float]:
    """Pearson's χ² of counts in equal bins and the probability of one as large, Q((n − 1) / 2, χ² / 2): the
    regularized gamma function."""
    expected = counts.double().mean()
    statistic = ((counts.double() - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return statistic.item(), torch.special.gammaincc(freedom, statistic / 2).item()
