"""Damp and factorize the Hessian of a site, or the Hessians of several."""

import torch
from torch import Tensor

DAMP_RETRIES = 5
WIDTH, PARTS = 128, 16  # a Hessian is put in order by at least WIDTH rows at a time, in at most PARTS parts


class Indefinite(ArithmeticError):
    """Raised if a Hessian has no factorization; the message is the reason."""


def factorize(hessian: Tensor, damp: float, order: Tensor) -> tuple[Tensor, Tensor, str | None]:
    """Return upper triangular A with `A Aᵀ = damped(hessian, order, damping)`; that damping, `[(sites,) 1]`;
    and a note if damping had to grow. Needs memory for A alone, not for a second H.

    Adds `damp * mean(diag H)` to the diagonal, and ten times as much, at most five times, until H is positive
    definite. A column that no token reached has only damping, so it is rounded to nearest. Several Hessians
    `[sites, in, in]` are damped once.

    Raises Indefinite if that fails.
    """
    mean = hessian.diagonal(dim1=-2, dim2=-1).gather(-1, order).mean(-1, keepdim=True)
    mean += mean == 0  # no token reached any column: every choice is as good, nearest is natural
    info = torch.empty(hessian.shape[:-2], dtype=torch.int32, device=hessian.device)
    for attempt in range(DAMP_RETRIES + 1 if hessian.ndim == 2 else 1):
        share = damp * 10**attempt
        lower = damped(hessian.mT, order.flip(-1), share * mean).mT  # columns are contiguous, as LAPACK wants
        torch.linalg.cholesky_ex(lower, out=(lower, info))
        if not info.any() and torch.isfinite(lower.diagonal(dim1=-2, dim2=-1)).all():
            return _reversed(lower.mT).mT, share * mean, f"damping raised to {share:g}" if attempt else None
    raise Indefinite(f"Hessian is not positive definite even with damping {share:g}")


def damped(hessian: Tensor, order: Tensor, damping: Tensor) -> Tensor:
    """Return a copy of H with rows and columns in `order [(sites,) in]` and a damped diagonal. Needs memory
    for the copy and, of a single H, an eighth."""
    if order.ndim > 1:
        rows = hessian.gather(-2, order[..., None].expand_as(hessian))
        copy = rows.gather(-1, order[..., None, :].expand_as(hessian))
    else:  # along memory: on a CPU in a fifth of the time
        copy = torch.empty(hessian.shape, dtype=hessian.dtype, device=hessian.device)
        stored, moved = (hessian, copy) if hessian.is_contiguous() else (hessian.mT, copy.mT)
        width = max(WIDTH, len(order) // PARTS)
        for start in range(0, len(order), width):
            rows = slice(start, start + width)
            moved[rows] = stored.index_select(0, order[rows]).index_select(1, order)
    copy.diagonal(dim1=-2, dim2=-1).add_(damping)
    return copy


def unit_upper(A: Tensor) -> tuple[Tensor, Tensor]:
    """Return U, unit upper triangular, and D with `A Aᵀ = U diag(D) Uᵀ`; changes A in place."""
    pivots = A.diagonal(dim1=-2, dim2=-1).clone()
    return A.div_(pivots[..., None, :]), pivots.square()


def _reversed(matrices: Tensor) -> Tensor:
    """Return `[(sites,) n, n]` after reversing rows and columns in place, a few rows at a time."""
    size, width = matrices.shape[-1], max(WIDTH, matrices.shape[-1] // PARTS)
    for start in range(0, (size + 1) // 2, width):
        stop = min(start + width, (size + 1) // 2)
        first, last = matrices[..., start:stop, :], matrices[..., size - stop : size - start, :]
        first[...], last[...] = last.flip(-2, -1), first.flip(-2, -1)
    return matrices
