"""Orthogonal matrices that spread every channel over all of them: randomised Hadamard matrices.

A weight's outliers make its grid coarse; multiplied by a Hadamard matrix with random signs, its rows look
normal (QuIP#, arXiv:2402.04396, section 3; QuaRot, arXiv:2404.00456, section 3). `H_ab = H_a ⊗ H_b`, so that
products are made factor by factor, in n (a + b + …) operations a row instead of n².

Beside Sylvester's Hadamard matrices of powers of two there are Paley's, of order q + 1 or 2 (q + 1) for a
prime q, and the products of both: with them all widths of common models, such as 2304 = 36 · 64 and 3584 =
28 · 128. What is left takes a random orthogonal factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FACTOR = 64  # a power of two is split into factors of at most this


@dataclass(frozen=True)
class Orthogonal:
    """Q `[n, n]`: signs `[n]`, then the Kronecker product of `factors`, then a reflection by the unit vector
    `mirror [n]`, if there is one. All float32."""

    signs: Tensor
    factors: tuple[Tensor, ...]
    mirror: Tensor | None = None

    @property
    def width(self) -> int:
        """n."""
        return len(self.signs)

    @property
    def is_hadamard(self) -> bool:
        """Whether all entries have the same size, but for the reflection."""
        return all(bool(torch.allclose(part.abs(), part[0, 0].abs())) for part in self.factors)

    def turn(self, rows: Tensor) -> Tensor:
        """`rows Q` for float32 `rows [..., n]`, on their device."""
        sizes = [len(factor) for factor in self.factors]
        found = (rows * self.signs.to(rows.device)).reshape(-1, *sizes)
        for axis, factor in enumerate(self.factors, 1):
            found = (found.movedim(axis, -1) @ factor.to(rows.device)).movedim(-1, axis)
        found = found.reshape(rows.shape)
        if self.mirror is None:
            return found
        mirror = self.mirror.to(rows.device)
        return found - 2 * (found @ mirror)[..., None] * mirror

    def keeping_means(self) -> Orthogonal:
        """One with `Q 1 = 1`, which leaves the mean of the channels what it was: then a LayerNorm, which
        subtracts it, turns with its inputs as an RMSNorm does."""
        ones = torch.ones(self.width)
        off = ones - self.turn(ones)
        return replace(self, mirror=off / off.norm()) if off.norm() > 1e-3 else self


def random(width: int, seed: int) -> Orthogonal:
    """A randomised Hadamard matrix, or the nearest there is; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (width,), generator=generator).float() * 2 - 1
    odd = width // (width & -width)
    order = next((d for d in _doubled(odd, width) if _paley(d) is not None), 0)
    if odd == 1:
        first = []
    elif order:
        first = [_paley(order) / order**0.5]
    else:
        order = odd
        first = [_random_factor(odd, generator)]
    return Orthogonal(signs, tuple(first + list(_powers(width // (order or 1)))))


def _doubled(odd: int, width: int) -> Iterator[int]:
    """4, 8, … times the odd part, as far as they divide the width."""
    order = 4 * odd if odd > 1 else width + 1
    while order <= width and not width % order:
        yield order
        order *= 2


def _powers(width: int) -> Iterator[Tensor]:
    """Sylvester's matrices whose product has a width that is a power of two."""
    while width > 1:
        size = min(width, FACTOR)
        yield sylvester(size)
        width //= size


def _random_factor(width: int, generator: torch.Generator) -> Tensor:
    q, r = torch.linalg.qr(torch.randn(width, width, generator=generator))
    return q * r.diagonal().sign()


def _paley(order: int) -> Tensor | None:
    """Paley's Hadamard matrix (1933), entries 1 and -1; None where neither construction has this order."""
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
    """`[q, q]`: 1 where i - j is a square modulo q, -1 where it is none, 0 on the diagonal."""
    numbers = torch.arange(q)
    character = torch.full((q,), -1.0)
    character[numbers * numbers % q], character[0] = 1, 0
    character[0] = 0
    return character[(numbers[:, None] - numbers) % q]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % k for k in range(2, int(number**0.5) + 1))


def sylvester(size: int, device: torch.device | None = None) -> Tensor:
    """Sylvester's orthonormal matrix `[size, size]` of a power of 2, float32: symmetric, its own inverse."""
    found = torch.ones(1, 1, device=device)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found / size**0.5
