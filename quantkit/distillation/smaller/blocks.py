"""The importance of blocks: the divergence from the teacher's predictions if a block is left out.

Each round leaves out the least important blocks and measures the others again, since blocks that can be
spared one by one may not be together (SLEB, Song et al. 2024, arXiv 2402.09025, section 3). A round loads
each block once and runs all variants of the model through it; block k starts the variant without block k,
whose states are those before the block. A round with n blocks costs n²/2 forward passes of a block and keeps
the hidden states of n + 1 variants for a few thousand tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from quantkit.distillation import divergence
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import walk

RANKING_TOKENS = 4096  # the order of blocks settles long before their divergences do
PROBE_ROUNDS = 8  # maximum; then several blocks are left out per round

Counting = Callable[[int, int], None]  # rounds done, rounds in all


def choose(
    skeleton: Skeleton, batches: Sequence[Tensor], keep: int, listen: Counting = lambda done, total: None
) -> tuple[tuple[int, ...], list[dict[int, float]]]:
    """Return the indices of the `keep` most important blocks, in order, and for each round {block: divergence
    without the block}.

    batches: ids `[batch, tokens]`, all of one shape. Parameters outside the blocks must be loaded.
    """
    kept = list(range(len(skeleton.blocks)))
    rounds: list[dict[int, float]] = []
    teacher = list(walk.through(skeleton, batches)) if keep < len(kept) else []
    each = math.ceil((len(kept) - keep) / PROBE_ROUNDS)
    total = math.ceil((len(kept) - keep) / each) if each else 0
    while len(kept) > keep:
        listen(len(rounds), total)
        found = left_out(skeleton, batches, kept, teacher)
        rounds.append(found)
        for block in sorted(found, key=found.get)[: min(each, len(kept) - keep)]:
            kept.remove(block)
    return tuple(kept), rounds


def left_out(
    skeleton: Skeleton, batches: Sequence[Tensor], kept: Sequence[int], teacher: Sequence[Tensor]
) -> dict[int, float]:
    """Return {block: divergence from the teacher if this block of the `kept` ones is left out}.

    teacher: the teacher's final hidden states `[batch, tokens, hidden]` for each batch.
    """
    whole = [skeleton.embed(ids) for ids in batches]
    variants: dict[int, list[Tensor]] = {}
    for index, _ in walk.blocks(skeleton, lambda index: (None, False), only=kept):
        without = whole
        for variant in variants.values():
            variant[:] = through(skeleton, index, variant)
        whole = through(skeleton, index, whole)
        variants[index] = list(without)
    vocabulary = skeleton.checkpoint.text_config.vocab_size

    def far(variant: Sequence[Tensor]) -> float:
        pairs = zip(teacher, variant, strict=True)
        return divergence.mean(skeleton.logits, skeleton.logits, pairs, vocabulary)

    return {index: far(variant) for index, variant in variants.items()}


def without_others(skeleton: Skeleton, ids: Tensor, kept: Sequence[int]) -> Tensor:
    """Run ids `[batch, tokens]` through the blocks `kept` only; return the final hidden states, which the
    student's must equal."""
    states = [skeleton.embed(ids)]
    for index, _ in walk.blocks(skeleton, lambda index: (None, False), only=kept):
        states = through(skeleton, index, states)
    return states[0]


def through(skeleton: Skeleton, index: int, states: Sequence[Tensor]) -> list[Tensor]:
    """Return the hidden states after a loaded block. Raises QuantkitError if blocks pass more than hidden
    states to each other, since blocks then cannot be left out."""
    found = list(skeleton.outputs(index, states))
    width = skeleton.checkpoint.text_config.hidden_size
    if any(hidden.shape[-1] != width for hidden in (*states, *found)):
        raise QuantkitError(
            f"{skeleton.checkpoint.source} cannot be cut: its blocks pass more than hidden states to one "
            "another, such as keys, embeddings of the tokens or several streams",
            hint="quantkit cuts models whose blocks pass hidden states alone",
            exit_code=UNSUPPORTED,
        )
    return found
