"""The importance of blocks: the divergence from the teacher's predictions without each block.

Blocks are left out one after another, the least missed first, and the remaining blocks are measured again
(SLEB, Song et al. 2024, arXiv 2402.09025, section 3: blocks look dispensable one by one that are not so
together). A round is one walk over the weights, one block in memory at a time: the hidden states of every
variant go through it side by side, and a new variant begins at each block, with what entered it. n blocks
cost n²/2 forwards of a block, and the states of n + 1 variants of a few thousand tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from quantkit.distillation import divergence
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import walk

TOKENS = 4096  # that blocks are judged by: the order of blocks settles long before their divergences do
ROUNDS = 8  # at most; where more blocks than that are to go, several go in a round

Counting = Callable[[int, int], None]  # rounds done, rounds in all


def choose(
    skeleton: Skeleton, batches: Sequence[Tensor], keep: int, listen: Counting = lambda done, total: None
) -> tuple[tuple[int, ...], list[dict[int, float]]]:
    """Return the `keep` most important blocks, in order, and the divergences of each round, by the block left
    out.

    batches: ids `[batch, tokens]`, all of one shape. Parameters outside the blocks are loaded.
    """
    kept = list(range(len(skeleton.blocks)))
    rounds: list[dict[int, float]] = []
    teacher = list(walk.through(skeleton, batches)) if keep < len(kept) else []
    each = math.ceil((len(kept) - keep) / ROUNDS)
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
    """Return the divergence from the teacher without each of the `kept` blocks, by block.

    teacher: its final hidden states `[batch, tokens, hidden]`, by batch.
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
    """Return the final hidden states of ids `[batch, tokens]` in the model of the blocks `kept` alone, the
    expected result of the student."""
    states = [skeleton.embed(ids)]
    for index, _ in walk.blocks(skeleton, lambda index: (None, False), only=kept):
        states = through(skeleton, index, states)
    return states[0]


def through(skeleton: Skeleton, index: int, states: Sequence[Tensor]) -> list[Tensor]:
    """Return the hidden states after a loaded block. Raises QuantkitError if blocks pass more than these:
    what one leaves, another needs, so none can be left out."""
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
