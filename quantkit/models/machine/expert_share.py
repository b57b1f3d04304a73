"""The share of a mixture that is in memory at a time: numbers and names, for plans that load nothing."""

from __future__ import annotations

from collections.abc import Iterable

IN_STEP = 4  # batches that wait for one another where experts are read: each has its activations in memory
HELD = 2  # experts: what one batch still computes with, and what the others go on to
HOLES = 16 << 20  # bytes of experts that come and go before the heap gives its free pages back
SHARE = 0.25  # of an accelerator's free memory: smaller blocks stay there whole, which is faster
# What configurations call the number of experts of a layer, and of those that a token is routed to.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
ROUTED = ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "experts_per_token")


def expert_of(local: str) -> str:
    """Return `mlp.experts.3` for `mlp.experts.3.up_proj`."""
    return local.rpartition(".")[0]


def largest_expert(shapes: Iterable[tuple[str, int, int]]) -> int:
    """Return the weights of the largest of a block's experts, whose linears have these names and shapes; 0
    for none."""
    sizes: dict[str, int] = {}
    for local, out_features, in_features in shapes:
        sizes[expert_of(local)] = sizes.get(expert_of(local), 0) + out_features * in_features
    return max(sizes.values(), default=0)


def streams(nbytes: int, free: int | None) -> bool:
    """Return whether experts that take so much in the largest block are to be read when they are called.

    free: bytes of an accelerator, None where the CPU computes: that takes much longer to use an expert than
    to read it, so it always streams.
    """
    return nbytes > (0 if free is None else SHARE * free)
