"""Log-likelihoods of continuations, for any number of requests, through a streamed model."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.evaluation.stream import Listener, StreamedModel
from quantkit.quantize.calibrate import divergence
from quantkit.quantize.prepare.memory import BATCH_TOKENS

ROUND_TOKENS = 1 << 16  # tokens whose hidden states are in memory at a time
LENGTH_STEP = 32  # batch lengths are multiples of this: few shapes and little padding

Request = tuple[list[int], list[int]]  # ids of a context and of its continuation, neither empty
Batch = tuple[Tensor, list["Row"]]  # ids [rows, tokens], padded


class Row(NamedTuple):
    """Input for a request. number: position of the request. ids: token ids, of which the last `len(targets)`
    predict the ids `targets`."""

    number: int
    ids: list[int]
    targets: list[int]


class Score(NamedTuple):
    """The score of a continuation. log_prob: in nats. greedy: whether all its tokens were the most likely."""

    log_prob: float
    greedy: bool


def score(model: StreamedModel, requests: Sequence[Request], longest: int, listen: Listener) -> list[Score]:
    """Return the score of every request, in order. Requests longer than `longest` tokens lose their first.

    Padding is at the end of rows, where it does not affect a causal model.
    """
    rows = [
        Row(number, (context + continuation)[-(longest + 1) : -1], continuation[-longest:])
        for number, (context, continuation) in enumerate(requests)
    ]
    rows.sort(key=lambda row: len(row.ids), reverse=True)
    scores: dict[int, Score] = {}
    for batches in _rounds(rows, longest):
        states = model.states([ids for ids, _ in batches], listen)
        for (_, inside), hidden in zip(batches, states, strict=True):
            scores |= _scores(model, inside, hidden)
    return [scores[number] for number in range(len(requests))]


def _rounds(rows: Sequence[Row], longest: int) -> Iterator[list[Batch]]:
    """Yield lists of batches that run through the blocks together. Rows are sorted by length, the longest
    first; batches have about equal work."""
    together: list[Batch] = []
    start = token_count = 0
    while start < len(rows):
        length = min(longest, -(-len(rows[start].ids) // LENGTH_STEP) * LENGTH_STEP)
        inside = list(rows[start : start + max(1, BATCH_TOKENS // length)])
        ids = torch.tensor([row.ids + [0] * (length - len(row.ids)) for row in inside])
        if together and token_count + ids.numel() > ROUND_TOKENS:
            yield together
            together, token_count = [], 0
        together.append((ids, inside))
        start, token_count = start + len(inside), token_count + ids.numel()
    if together:
        yield together


def _scores(model: StreamedModel, rows: Sequence[Row], hidden: Tensor) -> dict[int, Score]:
    """Return {number: score} for a batch's rows, from final hidden states `[rows, tokens, hidden]`."""
    picked = torch.cat(
        [hidden[k, len(row.ids) - len(row.targets) : len(row.ids)] for k, row in enumerate(rows)]
    )
    targets = torch.tensor([token for row in rows for token in row.targets], device=picked.device)
    log_probs, likeliest = [], []
    size = model.chunk_tokens
    for part, expected in zip(picked.split(size), targets.split(size), strict=True):
        logits = model.skeleton.logits(part)
        log_probs.append(-divergence.nll(logits, expected.to(logits.device)).cpu().double())
        likeliest.append(logits.argmax(-1).cpu() == expected.cpu())
    counts = [len(row.targets) for row in rows]
    sums, hits = torch.cat(log_probs).split(counts), torch.cat(likeliest).split(counts)
    return {
        row.number: Score(values.sum().item(), bool(hit.all()))
        for row, values, hit in zip(rows, sums, hits, strict=True)
    }
