"""Backward pass through a model block by block, with the activations of one block in memory.

The forward pass keeps only the input of each block. The backward pass runs each block again with autograd,
given the gradient of its output (checkpointing by block, Chen et al. 2016, arXiv:1604.06174).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.quantize.calibrate import LOGITS_BYTES, LOGITS_TOKENS

Run = Callable[[Tensor], Tensor]  # a block on hidden states `[batch, tokens, hidden]`


def chunk_tokens(vocabulary: int) -> int:
    """Return the number of tokens whose logits are computed at a time."""
    return min(LOGITS_TOKENS, max(1, LOGITS_BYTES // (4 * vocabulary)))


def through_head(final: Tensor, size: int, loss: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """Return the gradient `[batch, tokens, hidden]` of a loss that is a sum over the tokens of `final`.

    loss: `loss(hidden, span)` is the loss of some tokens, `hidden [n, hidden]` with n <= `size`. span: their
    indices in `final` with batch and tokens flattened.
    """
    gradient, tokens = torch.empty_like(final), final.flatten(0, 1)
    rows = gradient.flatten(0, 1)
    for start in range(0, len(tokens), size):
        span = slice(start, start + size)
        with torch.enable_grad():
            hidden = tokens[span].detach().requires_grad_()
            loss(hidden, span).backward()
        rows[span] = hidden.grad
    return gradient


def through_block(run: Run, entering: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of a block's input from the gradient of its output; `run` computes the block."""
    entering = entering.detach().requires_grad_()
    with torch.enable_grad():
        run(entering).backward(gradient)
    return entering.grad
