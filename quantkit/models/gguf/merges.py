"""The merges of a BPE: ranked pairs in tokenizer.json, scored pieces in SentencePiece and GGUF files."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping

Merge = tuple[str, str]


def scores(merges: Iterable[Merge]) -> dict[str, float]:
    """Score of every token that is merged: the earlier its first merge, the higher, from 0 downwards."""
    products = dict.fromkeys(left + right for left, right in merges)
    return {token: -float(k) for k, token in enumerate(products)}


def from_scores(scores: Mapping[str, float], tokens: Collection[str]) -> list[Merge]:
    """Every pair of `tokens` that makes a scored token, the highest score first: what `scores` undoes.

    SentencePiece and llama.cpp merge whichever neighbours make the token of the highest score, so all
    ways to halve a token are merges of one rank (here the longer left half goes first).
    """
    merges = [
        (-score, -cut, token)
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    ]
    return [(token[:-cut], token[-cut:]) for _, cut, token in sorted(merges)]


def canonical(merges: Iterable[Merge]) -> list[tuple[str, list[Merge]]]:
    """Equal for merges that act alike: neighbours in rank that make the same token have no order."""
    runs = itertools.groupby(merges, key="".join)
    return [(token, sorted(run)) for token, run in runs]
