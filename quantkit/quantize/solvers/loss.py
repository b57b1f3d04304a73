"""What replacing `W` by `Ŵ` costs: `tr(dW H dWᵀ)` on the calibration tokens, whatever their number."""

from __future__ import annotations

from torch import Tensor

WIDTH = 128  # columns of a loss computed at a time


def row_losses(delta: Tensor, hessian: Tensor) -> Tensor:
    """`dw H dwᵀ` of every row of `delta [out, in]`, float32 `[out]`, from one triangle of the symmetric H."""
    total = delta.new_zeros(len(delta))
    for start in range(0, len(hessian), WIDTH):
        block = slice(start, start + WIDTH)
        product = delta[:, block] @ hessian[block, block]
        if start:
            product.addmm_(delta[:, :start], hessian[:start, block], alpha=2)
        total += product.mul_(delta[:, block]).sum(1)
    return total


def loss(delta: Tensor, hessian: Tensor) -> float:
    """`tr(dW H dWᵀ)` for `delta [out, in]`."""
    return row_losses(delta, hessian).sum().item()
