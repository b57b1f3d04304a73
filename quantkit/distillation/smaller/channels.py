"""Which channels of an MLP matter, by what they carry into the block's output on calibration text.

Channel c enters the linear that reads it (down) as x_c and adds x_c W[:, c] to the output, on average
`E[x_c²] |W[:, c]|²` of its energy: the channels with the most are kept. What is left of W is then fitted
again to give the outputs that it gave, by least squares over the text: `W' = W H[:, K] H[K, K]⁻¹` with `H =
2 XᵀX` of the reader's inputs, damped as GPTQ's (Frantar et al. 2023, arXiv 2210.17323, section 3; of whole
channels, Kurtic et al. 2023, arXiv 2302.04089). Block by block: each is measured on what the narrow blocks
before it make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.distillation.smaller.blocks import through
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import walk
from quantkit.quantize.calibrate.capture import Statistics, refuse_not_finite

DAMPING = 0.01  # of the mean of the diagonal


@dataclass(frozen=True)
class Narrowed:
    """Of a block: channels, int64 `[kept]`, ascending; reader: the weight of the linear that reads them, as
    it is stored, `[out, kept]`."""

    channels: Tensor
    reader: Tensor


def narrow(
    skeleton: Skeleton,
    batches: Sequence[Tensor],
    kept: Sequence[int],
    reader: str | None,
    keep: int | None,
    listen: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[int, Narrowed], Tensor]:
    """What is left of each of the blocks, by its index in the teacher, and the final hidden states of the
    first batch of the model without the others: nothing is left of the others, so this is what the student
    must compute. Without a `reader`, a name inside a block, blocks stay as wide as they are.
    """
    states = [skeleton.embed(ids) for ids in (batches if reader is not None else batches[:1])]
    found: dict[int, Narrowed] = {}
    for place, (index, block) in enumerate(walk.blocks(skeleton, lambda index: (None, False), only=kept)):
        listen(place, len(kept))
        if reader is not None:
            found[index] = _narrow(skeleton, index, block, states, reader, keep)
        states = through(skeleton, index, states)
    listen(len(kept), len(kept))
    return found, states[0]


def _narrow(
    skeleton: Skeleton, index: int, block: nn.Module, states: Sequence[Tensor], reader: str, keep: int
) -> Narrowed:
    """Choose the channels of a loaded block, which from now on computes without the others."""
    linear = block.get_submodule(reader)
    sums = Statistics(linear.in_features, skeleton.device, ("hessian",))
    hook = linear.register_forward_pre_hook(lambda module, args: sums.add(args[0]))
    try:
        through(skeleton, index, states)
    finally:
        hook.remove()
    statistics = sums.finish()
    refuse_not_finite(statistics, skeleton.names.of_block(index, reader), str(skeleton.dtype))
    channels = most(statistics.hessian, linear.weight.float(), keep)
    fitted = refit(statistics.hessian, linear.weight.float(), channels)
    fitted = fitted.to(skeleton.stored_dtype(index, f"{reader}.weight"))
    alone = torch.zeros_like(linear.weight)
    alone[:, channels] = fitted.to(alone.dtype)
    linear.weight = nn.Parameter(alone, requires_grad=False)
    return Narrowed(channels.cpu(), fitted.cpu())


def most(hessian: Tensor, weight: Tensor, keep: int) -> Tensor:
    """The `keep` channels that carry the most into the outputs of `weight [out, in]`, ascending; of equal
    ones the first."""
    energy = hessian.diagonal() * weight.square().sum(0)
    return energy.sort(descending=True, stable=True).indices[:keep].sort().values


def refit(hessian: Tensor, weight: Tensor, channels: Tensor) -> Tensor:
    """`[out, kept]` by which the kept channels make up for the others as far as they can.

    hessian: `[in, in]`, of the inputs of `weight [out, in]`, both float32.
    """
    inner = hessian[channels][:, channels].clone()
    inner.diagonal().add_(DAMPING * inner.diagonal().mean().clamp(min=torch.finfo(inner.dtype).tiny))
    # W H[:, K] with W = (W_K, W_rest): damping must not shrink what is kept, so only the rest is spread
    rest = torch.ones(len(hessian), dtype=torch.bool, device=hessian.device)
    rest[channels] = False
    spread = weight[:, rest] @ hessian[rest][:, channels]
    return weight[:, channels] + torch.cholesky_solve(spread.t(), torch.linalg.cholesky(inner)).t()
