"""How much of a mixture is in memory at a time: sizes and names, computed without loading a model."""

from collections.abc import Iterable

IN_STEP = 4  # batches that run interleaved; the activations of each are in memory
IN_MEMORY = 2  # experts in memory: the current one, and the next one of other batches
EXPERT_HOLES = 16 << 20  # bytes of experts released between heap trims
SHARE = 0.25  # part of an accelerator's free memory; smaller blocks stay there whole, which is faster
# Names in configurations: the number of experts of a layer, and of those that a token is routed to.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
ROUTED = ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "experts_per_token")


def expert_of(local: str) -> str:
    """Return the expert of a linear: `mlp.experts.3` for `mlp.experts.3.up_proj`."""
    return local.rpartition(".")[0]


def largest_expert(shapes: Iterable[tuple[str, int, int]]) -> int:
    """Return the number of weights of a block's largest expert; 0 without experts. shapes: (name, out, in) of
    the experts' linears."""
    sizes: dict[str, int] = {}
    for local, out_features, in_features in shapes:
        sizes[expert_of(local)] = sizes.get(expert_of(local), 0) + out_features * in_features
    return max(sizes.values(), default=0)


def streams(nbytes: int, free: int | None) -> bool:
    """Return whether experts are read only when called. nbytes: of all experts of the largest block.

    free: free bytes of an accelerator; None for the CPU. The CPU always streams, because it takes much longer
    to compute an expert than to read it.
    """
    return nbytes > (0 if free is None else SHARE * free)
