"""Statistics of a block's inputs: for each site the Hessian and other sums that a method needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from quantkit.errors import require
from quantkit.grids.grid import is_finite
from quantkit.models.machine import distributed
from quantkit.models.machine.device import widens
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.solvers import SiteStatistics

TINY = torch.finfo(torch.float32).tiny
KEPT_INPUTS = 512  # inputs of a site that are kept as they are, at most


@dataclass(frozen=True)
class Counterpart:
    """A batch in the original model. inputs: of the site, `[..., in]`. weight: of the site's only linear,
    `[out, in]`. missing: hidden states to which that linear adds its output, original minus quantized model,
    float32 `[..., out]`."""

    inputs: Tensor
    weight: Tensor | None = None
    missing: Tensor | None = None


def _correlate(sums: Tensor | None, short: Tensor, rows: Tensor) -> Tensor:
    """Add `shortᵀ rows` of the first and the second half of a batch to `sums [2, width, in]`."""
    if sums is None:
        sums = short.new_zeros(2, short.shape[1], rows.shape[1])
    half = len(rows) // 2
    for total, part in zip(sums, (slice(0, half), slice(half, None)), strict=True):
        if rows.itemsize == 2:
            total += _product(short[part].t(), rows[part])
        else:
            total.addmm_(short[part].t(), rows[part])
    return sums


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left right` in float32 for a float32 and a bfloat16 matrix: `left` becomes a sum of two
    bfloat16 matrices, which leaves 2^-17 of it, so that tensor cores multiply."""
    high = left.bfloat16()
    found = torch.mm(high, right, out_dtype=torch.float32)
    return found.add_(torch.mm((left - high).bfloat16(), right, out_dtype=torch.float32))


class Statistics:
    """Sums over the inputs of one site, in float32, batch by batch. needs: fields of SiteStatistics.

    H is symmetric, so only tiles on and below the diagonal are computed (a blocked symmetric rank-k update),
    little more than half of the products. Sums of squares are added up in float64.
    """

    def __init__(self, in_features: int, device: torch.device, needs: Collection[str] = ("hessian",)):
        self.in_features, self.device = in_features, device
        self.tokens = 0
        self.width = min(in_features, max(128, in_features // 8))
        self.hessian = torch.zeros(in_features, in_features, device=device) if "hessian" in needs else None
        self.magnitude = torch.zeros(in_features, device=device) if "magnitude" in needs else None
        self.peak = torch.zeros(in_features, device=device) if "peak" in needs else None
        self.squares: list[Tensor] | None = [] if "square" in needs else None  # of each batch
        self.fourths: list[Tensor] | None = [] if "fourth" in needs else None  # of each half of a batch
        self.inputs = torch.zeros(0, in_features, device=device) if "inputs" in needs else None
        self.every = 1  # of so many tokens, one is kept
        self.paired: Tensor | None = None  # the part of H of batches with a counterpart
        self.paired_tokens = 0
        self.drift: Tensor | None = None
        self.missing: Tensor | None = None

    def add(self, inputs: Tensor, counterpart: Counterpart | None = None) -> None:
        """Add a batch of inputs `[..., in]`, in float32."""
        exact = inputs.reshape(-1, self.in_features)
        rows = exact.float()
        self.tokens += len(rows)
        if not len(rows):  # of an expert that no token of this batch was routed to
            return
        if self.peak is not None:
            self.peak = torch.maximum(self.peak, rows.abs().amax(0))
        if self.squares is not None:
            self.squares.append(rows.square().sum(0))
        if self.inputs is not None:
            self._keep(rows)
        if self.fourths is not None:
            equal = rows * rows.square().mean(1, keepdim=True).clamp(min=TINY).rsqrt()
            self.fourths += (part.pow(4).sum(0) for part in equal.tensor_split(2))
        if self.magnitude is not None:
            self.magnitude += rows.abs().sum(0)
        factor = exact if exact.itemsize == 2 and widens(exact.device) else rows
        if counterpart is not None:
            self._pair(rows, rows if factor.dtype == torch.float16 else factor, counterpart)
        sums = self.hessian if counterpart is None else self.paired
        if sums is not None:
            self._add_moments(sums, factor)

    def _pair(self, rows: Tensor, factor: Tensor, counterpart: Counterpart) -> None:
        """Compare a batch with its counterpart in the original model. factor: the batch in the type in which
        it is multiplied; float16 has too few exponents for the differences."""
        self.paired = torch.zeros_like(self.hessian) if self.paired is None else self.paired
        self.paired_tokens += len(rows)
        drift = counterpart.inputs.reshape(rows.shape).float() - rows
        if counterpart.weight is None:
            self.drift = _correlate(self.drift, drift, factor)
            return
        weight = counterpart.weight.t()
        narrow = factor.itemsize == 2 and weight.dtype == factor.dtype
        missing = _product(drift, weight) if narrow else drift @ weight.float()
        if counterpart.missing is not None:
            missing += counterpart.missing.view_as(missing)
        self.missing = _correlate(self.missing, missing, factor)

    def _add_moments(self, sums: Tensor, rows: Tensor) -> None:
        for start in range(0, self.in_features, self.width):
            panel = slice(start, min(start + self.width, self.in_features))
            part, factors = sums[panel, : panel.stop], (rows[:, panel].t(), rows[:, : panel.stop])
            if rows.itemsize == 2:  # their products are exact in float32
                part += torch.mm(*factors, out_dtype=torch.float32)
            else:
                part.addmm_(*factors)

    def finish(self) -> SiteStatistics:
        """Return the averaged statistics of all ranks. The accumulator cannot be used afterwards."""
        if distributed.count() > 1:
            self._add_up()
        tokens = max(self.tokens, 1)
        if self.paired is not None:
            self.hessian += self.paired
        if self.paired_tokens == self.tokens:
            self.paired = None
        for sums, summed in ((self.hessian, tokens), (self.paired, self.paired_tokens)):
            if sums is not None:
                _mirror(sums.mul_(2 / summed), self.width)
        if self.magnitude is not None:
            self.magnitude.div_(tokens)
        for sums in (self.drift, self.missing):
            if sums is not None:
                sums.mul_(2 / self.paired_tokens)
        square = self.square_sums()
        square = None if square is None else square.float() / tokens
        return SiteStatistics(
            self.hessian, self.magnitude, self.peak, square, self.tokens, self.paired, self.drift,
            self.missing, inputs=self.inputs, fourth=self._fourth(),
        )  # fmt: skip

    def _add_up(self) -> None:
        """Add the sums of the other ranks."""
        self.tokens = sum(distributed.all_gather(self.tokens))
        self.paired_tokens = sum(distributed.all_gather(self.paired_tokens))
        if self.peak is not None:
            distributed.largest_(self.peak)
        if self.squares is not None:
            self.squares = [one for part in distributed.all_gather(self.squares) for one in part]
        if self.fourths is not None:
            self.fourths = [one for part in distributed.all_gather(self.fourths) for one in part]
        if self.inputs is not None:
            parts = distributed.all_gather((self.inputs, self.every))
            self.every = max(every for _, every in parts)
            self.inputs = torch.cat([inputs[:: self.every // every] for inputs, every in parts])
            self._thin()
        for sums in (self.hessian, self.magnitude):
            if sums is not None:
                distributed.sum_(sums)
        for name in ("paired", "drift", "missing"):
            setattr(self, name, self._added(getattr(self, name)))

    def _added(self, sums: Tensor | None) -> Tensor | None:
        """Return the sum over all ranks that have `sums`; None if no rank has them."""
        shape = max(distributed.all_gather(() if sums is None else tuple(sums.shape)))
        if shape and sums is None:
            sums = torch.zeros(shape, device=self.device)
        return distributed.sum_(sums) if shape else None

    def _keep(self, rows: Tensor) -> None:
        """Keep every `every`-th row, at most KEPT_INPUTS rows in all."""
        self.inputs = torch.cat([self.inputs, rows[:: self.every]])
        self._thin()

    def _thin(self) -> None:
        while len(self.inputs) > KEPT_INPUTS:
            self.inputs, self.every = self.inputs[::2].clone(), 2 * self.every

    def _fourth(self) -> Tensor | None:
        """Return mean fourth powers over the first and the second half of the tokens, `[2, in]`."""
        if self.fourths is None:
            return None
        if not self.fourths:
            return torch.zeros(2, self.in_features, device=self.device)
        halves = torch.stack(self.fourths).tensor_split(2)
        return torch.stack([half.sum(0) for half in halves]) * (2 / self.tokens)

    def square_sums(self) -> Tensor | None:
        """Return Σx² of each channel, float64 `[in]`, on the host, because not every device has float64."""
        if not self.squares:
            return None if self.squares is None else torch.zeros(self.in_features, dtype=torch.float64)
        return torch.stack(self.squares).cpu().double().sum(0)


def _mirror(lower: Tensor, width: int) -> None:
    """Copy the part below the diagonal to above the diagonal, in place, `width` columns at a time."""
    diagonal = lower.tril_().diagonal().clone()
    for start in range(0, len(lower), width):
        panel = slice(start, start + width)
        lower[: panel.stop, panel] += lower[panel, : panel.stop].t().clone()
    lower.diagonal().copy_(diagonal)


def refuse_not_finite(statistics: SiteStatistics, linear: str, dtype: str) -> None:
    """Raise QuantkitError naming `linear` if its inputs overflowed in `dtype`."""
    parts = [getattr(statistics, field.name) for field in fields(statistics)]
    what = f"activations entering {linear} are not finite in {dtype}"
    hint = "try --dtype float32; if that fails too, the checkpoint itself overflows"
    require(all(is_finite(part) for part in parts if isinstance(part, Tensor)), what, hint)


def gather(
    block: nn.Module,
    sites: Iterable[Site],
    needs: Collection[str],
    device: torch.device,
    forward: Callable[[], object],
    counterpart: Callable[[Site], Counterpart | None] = lambda site: None,
) -> dict[Site, Statistics]:
    """Return the sums over the inputs of every site. forward: runs the block on all batches. counterpart:
    returns the current batch at a site in the original model."""
    gathered = {}
    with ExitStack() as stack:
        for site in sites:
            gathered[site] = sums = Statistics(site.in_features, device, needs)
            hook = block.get_submodule(site.place).register_forward_pre_hook(
                lambda module, args, sums=sums, site=site: sums.add(args[0], counterpart(site))
            )
            stack.callback(hook.remove)
        forward()
    return gathered
