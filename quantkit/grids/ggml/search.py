"""ggml's searches for the scales of groups of weights, bit for bit (llama.cpp, ggml/src/ggml-quants.c).

Groups are columns of `x [size, groups]` (float32), so one pass over memory handles all groups, and sums over
a group run in C's order, one weight after another. Every product is associated as in C. Constants are float32
as in C, and no multiply-add is fused.

`scale` and `low`: `x ≈ scale * code - low`. Signed searches have no `low`, and codes in -nmax .. nmax - 1.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

EPSILON = 1e-15  # GROUP_MAX_EPS: a group whose weights are all smaller is taken for zero
ROUNDS = 5  # in which codes are chosen again
FEW = 8  # columns below which numpy may not sum row by row


def total(terms: Tensor) -> Tensor:
    """Return the sum over dimension 0 of `[size, ...]`, one term after another."""
    if terms.device.type != "cpu":
        return terms.cumsum(0)[-1]  # on CUDA a thread walks down each column
    if terms[0].numel() >= FEW:
        return torch.from_numpy(np.add.reduce(terms.numpy(), axis=0))
    result = terms[0].clone()
    for term in terms[1:]:
        result += term
    return result


def square_root(x: Tensor) -> Tensor:
    """Return the correctly rounded square root; torch.sqrt on a CPU is less exact."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def over(numerator: float, x: Tensor) -> Tensor:
    """Return `numerator / x`, correctly rounded; for a number torch would multiply by the reciprocal."""
    return torch.full_like(x, numerator).div_(x)


def inverse(d: Tensor) -> Tensor:
    """Return `1 / d`; 0 where d is 0."""
    return torch.where(d == 0, 0.0, over(1, d))


def single(*terms: float) -> float:
    """Return the sum of constants, rounded to float32 after each addition as in C."""
    result = np.float32(terms[0])
    for term in terms[1:]:
        result = np.float32(result + np.float32(term))
    return float(result)


def times(a: float, b: float) -> float:
    """Return the product of two constants in float32."""
    return float(np.float32(a) * np.float32(b))


def extreme(x: Tensor) -> Tensor:
    """Return the value of largest magnitude in each column; of equal magnitudes the first."""
    if x.device.type != "cpu":
        return x.gather(0, x.abs().argmax(0, keepdim=True))[0].add_(0.0)  # never -0
    high, low = x.amax(0), x.amin(0)
    values = torch.where(high > -low, high, low).add_(0.0)  # never -0
    tied = ((high == -low) & (high > 0)).nonzero()[:, 0]
    return _first_of_equals(x, values, tied)


def lowest(x: Tensor) -> Tensor:
    """Return the smallest value of each column; of 0 and -0 the first."""
    if x.device.type != "cpu":
        return x.min(0).values
    values = x.amin(0)
    return _first_of_equals(x, values, (values == 0).nonzero()[:, 0])


def _first_of_equals(x: Tensor, values: Tensor, tied: Tensor) -> Tensor:
    """Return `values`; in the columns `tied`, the first value of x with the same magnitude."""
    if len(tied):
        columns = x[:, tied]
        places = (columns.abs() == values[tied].abs()).to(torch.uint8).argmax(0)
        values[tied] = columns.gather(0, places[None])[0]
    return values


class Plan(NamedTuple):
    """Scales that make_qkx tries: ranges of `nmax + start + step k` codes, k = 0 .. count. absolute: minimise
    absolute instead of squared errors."""

    start: float
    step: float
    count: int
    absolute: bool = False


WITH_IMPORTANCE = Plan(-0.9, 0.05, 36)


def make_qkx(x: Tensor, weights: Tensor, nmax: int, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale and offset `low`, `[groups]`, and codes in 0 .. nmax (make_qkx2_quants, make_qkx3_quants).

    Starting with the range of x, finer and coarser scales are tried. For the codes of each, scale and low
    with the least `Σ weights (x - scale code + low)²` are computed; the best are kept.
    """
    low = lowest(x).clamp_(max=0)
    high = x.amax(0)
    flat = high <= low
    high = torch.where(flat, low + 1, high)
    code, product, other = (torch.empty_like(x) for _ in range(3))
    torch.mul(weights, x, out=product)
    sum_w, sum_x = total(weights), total(product)

    factor = over(nmax, high - low)
    scale = over(1, factor)
    factor = finite(factor)
    _round_from(x, low, factor, nmax, code)
    best = _error(x, weights, code, scale, low, plan.absolute, other)
    used = (factor, low)
    for k in range(plan.count + 1):
        factor = finite(over(single(plan.start, times(plan.step, k), nmax), high - low))
        _round_from(x, low, factor, nmax, code)
        torch.mul(weights, code, out=product)
        sum_l = total(product)
        sum_xl = total(torch.mul(product, x, out=other))
        sum_l2 = total(product.mul_(code))
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l).div_(determinant)
        new_low = (sum_l2 * sum_x - sum_l * sum_xl).div_(determinant)
        above = new_low > 0
        new_scale = torch.where(above, sum_xl / sum_l2, new_scale)
        new_low.masked_fill_(above, 0)
        error = _error(x, weights, code, new_scale, new_low, plan.absolute, other)
        better = (determinant > 0) & (error < best)
        used = tuple(torch.where(better, a, b) for a, b in zip((factor, low), used, strict=True))
        best = torch.where(better, error, best)
        scale = torch.where(better, new_scale, scale)
        low = torch.where(better, new_low, low)
    _round_from(x, used[1], used[0].masked_fill(flat, 0), nmax, code)
    return scale.masked_fill_(flat, 0), -low, code


def finite(factor: Tensor) -> Tensor:
    """Return factors with infinite and undefined ones replaced by 0, as C rounds their products."""
    return factor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _round_from(x: Tensor, low: Tensor, factor: Tensor, nmax: int, out: Tensor) -> None:
    torch.sub(x, low, out=out).mul_(factor).round_().clamp_(0, nmax)


def _error(
    x: Tensor, weights: Tensor, code: Tensor, scale: Tensor, low: Tensor, absolute: bool, buffer: Tensor
) -> Tensor:
    torch.mul(code, scale, out=buffer).add_(low).sub_(x)
    buffer = buffer.abs_() if absolute else buffer.mul_(buffer)
    return total(buffer.mul_(weights))


def refitted(
    sums: Callable[[Tensor], tuple[Tensor, Tensor]], factors: Iterable[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the scale `[groups]` refitted to the codes l of the best of `factors`, and that factor. sums:
    computes `Σ weights x l` and `Σ weights l²` of a factor's codes. The best has the largest
    `(Σ weights x l)² / Σ weights l²`; of equal ones the first."""
    factors = iter(factors)
    used = next(factors)
    sum_lx, sum_l2 = sums(used)
    scale = torch.where(sum_l2 > 0, sum_lx / sum_l2, 0.0)
    best = scale * sum_lx
    for factor in factors:
        sum_lx, sum_l2 = sums(factor)
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        fitted = sum_lx / sum_l2
        scale = torch.where(better, fitted, scale)
        best = torch.where(better, fitted * sum_lx, best)
        used = torch.where(better, factor, used)
    return scale, used


def make_qx(x: Tensor, weights: Tensor, nmax: int, wide: bool = False) -> tuple[Tensor, Tensor]:
    """Return the signed scale `[groups]` (make_qx_quants): the best of 19 around the one that fits the
    largest weight, farther apart if `wide`. Also returns the stored codes, `l + nmax`, or 0 in a group of
    zeros."""
    largest = extreme(x)
    zero = largest.abs() < EPSILON
    largest = largest.masked_fill(zero, 1)
    weighted = weights * x
    code, product = torch.empty_like(x), torch.empty_like(x)

    def sums(factor: Tensor) -> tuple[Tensor, Tensor]:
        torch.mul(x, factor, out=code).round_().clamp_(-nmax, nmax - 1)
        sum_lx = total(torch.mul(weighted, code, out=product))
        return sum_lx, total(torch.mul(weights, code, out=product).mul_(code))

    apart = max(0.1, nmax / 80) if wide else 0.1
    tried = (nmax, *(single(nmax, times(apart, k)) for k in range(-9, 10) if k))
    scale, used = refitted(sums, (over(-size, largest) for size in tried))
    torch.mul(x, used, out=code).round_().clamp_(-nmax, nmax - 1).add_(nmax)
    return scale.masked_fill_(zero, 0), clear(code, zero)


def clear(code: Tensor, columns: Tensor) -> Tensor:
    """Return `code` with 0 in some columns, `[groups]` bool. Usually there are none, so a check first saves a
    pass on a CPU; on an accelerator, the check would wait."""
    return code.masked_fill_(columns, 0) if columns.device.type != "cpu" or columns.any() else code


def make_q3(x: Tensor, nmax: int) -> tuple[Tensor, Tensor]:
    """Return signed scale and codes (make_q3_quants). In rounds, each code is chosen again, given the others,
    so that `(Σ w x l)² / Σ w l²` grows, with w = x². Codes as in make_qx."""
    largest = extreme(x)
    zero = largest.abs() < EPSILON
    weights = x * x
    code = (x * over(-nmax, largest.masked_fill(zero, 1))).round_().clamp_(-nmax, nmax - 1)
    scale = _descend(x, weights, code, (-nmax, nmax - 1), squares_positive=False)
    return scale.masked_fill_(zero, 0), clear(code.add_(nmax), zero)


def make_qp(x: Tensor, weights: Tensor, nmax: int) -> tuple[Tensor, Tensor]:
    """Return scale `[groups]` and codes 0 .. nmax (make_qp_quants): the best of nine scales, then rounds as
    in make_q3. x has few negative values; C stores codes in bytes, so it reads -1 as 255."""
    largest = x.amax(0)
    zero = largest < EPSILON
    largest = largest.masked_fill(zero, 1)
    used = over(nmax, largest)
    best = None
    for k in (0, -4, -3, -2, -1, 1, 2, 3, 4):
        factor = over(single(times(0.1, k), nmax), largest) if k else used
        code = (x * factor).round_()
        code = code.clamp_(max=nmax) if k else code.remainder_(256)
        difference = x - over(1, factor) * code
        error = total(weights * difference * difference)
        if best is None:
            best = error
            continue
        better = error < best
        best, used = torch.where(better, error, best), torch.where(better, factor, used)
    code = (x * used).round_().clamp_(max=nmax)
    scale = _descend(x, weights, code, (None, nmax), squares_positive=True)
    return scale.masked_fill_(zero, 0), clear(code, zero)


def _descend(x: Tensor, weights: Tensor, code: Tensor, bounds: tuple, squares_positive: bool) -> Tensor:
    """Run the rounds of make_q3 and make_qp on `code`, in place; return the final scale `[groups]`.

    squares_positive: a move requires a positive `Σ w l²` of the other codes before it, not only after it.
    """
    weighted = weights * x
    sum_lx, sum_l2 = total(weighted * code), total(weights * code * code)
    if squares_positive:
        code.remainder_(256)
    for _ in range(ROUNDS):
        own = weighted * code, (weights * code).mul_(code)
        for x_i, w_i, wx_i, l_i, lx_i, l2_i in zip(x, weights, weighted, code, *own, strict=True):
            rest_lx, rest_l2 = sum_lx - lx_i, sum_l2 - l2_i
            new = (x_i * rest_l2).div_(rest_lx).round_().clamp_(*bounds)
            new_lx = (wx_i * new).add_(rest_lx)
            new_l2 = (w_i * new).mul_(new).add_(rest_l2)
            better = (rest_lx > 0) & (new != l_i) & ((rest_l2 if squares_positive else new_l2) > 0)
            better &= (new_lx * new_lx).mul_(sum_l2) > (sum_lx * sum_lx).mul_(new_l2)
            torch.where(better, new.remainder_(256) if squares_positive else new, l_i, out=l_i)
            torch.where(better, new_lx, sum_lx, out=sum_lx)
            torch.where(better, new_l2, sum_l2, out=sum_l2)
    return torch.where(sum_l2 > 0, sum_lx / sum_l2, 0.0)
