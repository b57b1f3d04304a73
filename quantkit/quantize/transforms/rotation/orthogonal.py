"""Orthogonal matrices that spread every channel over all channels: randomised Hadamard matrices.

Outliers make a weight's grid coarse. After multiplication by a Hadamard matrix with random signs, its rows
are nearly normally distributed (QuIP#, arXiv:2402.04396, section 3; QuaRot, arXiv:2404.00456, section 3).
`H_ab = H_a ⊗ H_b`, so products are computed factor by factor, in n (a + b + …) operations per row instead of
n².

Sylvester's matrices have powers of two as orders, Paley's q + 1 or 2 (q + 1) for a prime q. Their products
cover all widths of common models, such as 2304 = 36 · 64 and 3584 = 28 · 128. Other widths get a random
orthogonal factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 64  # a power of two is split into factors of at most this


@dataclass(frozen=True)
class Orthogonal:
    """Q `[n, n]`: diagonal `signs [n]` times the Kronecker product of `factors`. All are float32."""

    signs: Tensor
    factors: tuple[Tensor, ...]

    @property
    def width(self) -> int:
        """Return n."""
        return len(self.signs)

    @property
    def is_hadamard(self) -> bool:
        """Return whether all entries have the same absolute value."""
        return all(bool(torch.allclose(part.abs(), part[0, 0].abs())) for part in self.factors)

    def turn(self, rows: Tensor) -> Tensor:
        """Return `rows Q` for float32 `rows [..., n]`, on their device."""
        sizes = [len(factor) for factor in self.factors]
        found = (rows * self.signs.to(rows.device)).reshape(-1, *sizes)
        for axis, factor in enumerate(self.factors, 1):
            found = (found.movedim(axis, -1) @ factor.to(rows.device)).movedim(-1, axis)
        return found.reshape(rows.shape)


def random(width: int, seed: int) -> Orthogonal:
    """Return a randomised Hadamard matrix; if the width has none, with one random orthogonal factor."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (width,), generator=generator).float() * 2 - 1
    even = width & -width
    odd = width // even
    orders = (odd << k for k in range(2, even.bit_length()))  # 4, 8, … times the odd part
    order = next((n for n in orders if _paley(n) is not None), odd) if odd > 1 else 1
    factors = []
    if odd > 1:
        factors.append(_paley(order) / order**0.5 if order > odd else _random_factor(odd, generator))
    rest = width // order
    while rest > 1:
        factors.append(sylvester(min(rest, FACTOR)))
        rest //= len(factors[-1])
    return Orthogonal(signs, tuple(factors))


def _random_factor(width: int, generator: torch.Generator) -> Tensor:
    q, r = torch.linalg.qr(torch.randn(width, width, generator=generator))
    return q * r.diagonal().sign()


def _paley(order: int) -> Tensor | None:
    """Return Paley's Hadamard matrix (1933), entries 1 and -1; None if Paley has none of this order."""
    q = order - 1
    if q % 4 == 3 and _is_prime(q):  # I + S with S skew
        core = _jacobsthal(q)
        skew = torch.zeros(order, order)
        skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1, -1, core
        return skew + torch.eye(order)
    q = order // 2 - 1
    if order % 4 == 0 and q % 4 == 1 and _is_prime(q):
        conference = torch.zeros(q + 1, q + 1)
        conference[0, 1:], conference[1:, 0], conference[1:, 1:] = 1, 1, _jacobsthal(q)
        ones, other = torch.tensor([[1.0, 1], [1, -1]]), torch.tensor([[1.0, -1], [-1, -1]])
        return torch.kron(conference, ones) + torch.kron(torch.eye(q + 1), other)
    return None


def _jacobsthal(q: int) -> Tensor:
    """Return a matrix `[q, q]`: 1 where i - j is a square modulo q, -1 elsewhere, 0 on the diagonal."""
    numbers = torch.arange(q)
    character = torch.full((q,), -1.0)
    character[numbers * numbers % q], character[0] = 1, 0
    character[0] = 0
    return character[(numbers[:, None] - numbers) % q]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % k for k in range(2, int(number**0.5) + 1))


def sylvester(size: int, device: torch.device | None = None) -> Tensor:
    """Return Sylvester's orthonormal matrix `[size, size]`, float32, its own inverse; size: a power of 2."""
    found = torch.ones(1, 1, device=device)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found / size**0.5
