"""Sums over the inputs of a block's sites, batch by batch, from which `SiteStatistics` are made."""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.layouts import Statistic
from quantkit.models.machine import distributed
from quantkit.models.machine.device import is_accelerator, narrow_products, widens
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.calibrate.statistics import TINY, Drift, SiteStatistics

KEPT_INPUTS = 512  # limit of the rows of X that `Inputs` keeps
WHOLE = 4096  # inputs below which an accelerator computes all of H: launches take longer than products


@dataclass(frozen=True)
class Counterpart:
    """A batch at a site of the original model. inputs: the site's inputs, `[..., in]`. weight: weight of the
    site's only linear, `[out, in]`. missing: the hidden states to which this linear adds its output, original
    minus quantized model, float32 `[..., out]`. scale: RMS of the original's, `[...]`, which errors are
    divided by."""

    inputs: Tensor
    weight: Tensor | None = None
    missing: Tensor | None = None
    scale: Tensor | None = None


class Hessian:
    """`2 XᵀX / tokens`. H is symmetric, so only tiles on and below the diagonal are computed (a blocked
    symmetric rank-k update), little more than half of the products."""

    def __init__(self, in_features: int, device: torch.device):
        whole = is_accelerator(device) and in_features <= WHOLE
        self.width = in_features if whole else min(in_features, max(128, in_features // 8))
        self.sums = torch.zeros(in_features, in_features, device=device)

    def add(self, rows: Tensor) -> None:
        """Add inputs `[tokens, in]`: float32, or 16 bit if the device sums products in float32."""
        for start in range(0, len(self.sums), self.width):
            panel = slice(start, min(start + self.width, len(self.sums)))
            _add_product(self.sums[panel, : panel.stop], rows[:, panel].t(), rows[:, : panel.stop])

    def gather(self) -> None:
        """Add the other ranks' sums."""
        distributed.sum_(self.sums)

    def mean(self, tokens: int) -> Tensor:
        """Return H for `tokens` rows; changes the sums in place."""
        lower = self.sums.mul_(2 / tokens).tril_()
        diagonal = lower.diagonal().clone()
        for start in range(0, len(lower), self.width):  # mirror the part below the diagonal
            panel = slice(start, start + self.width)
            lower[: panel.stop, panel] += lower[panel, : panel.stop].t().clone()
        lower.diagonal().copy_(diagonal)
        return lower


class Magnitude:
    """Mean |x| of each channel."""

    def __init__(self, in_features: int, device: torch.device):
        self.sums = torch.zeros(in_features, device=device)

    def add(self, rows: Tensor) -> None:
        """Add inputs `[tokens, in]`, as all classes below do."""
        self.sums += rows.abs().sum(0)

    def gather(self) -> None:
        """Add the other ranks' sums."""
        distributed.sum_(self.sums)

    def mean(self, tokens: int) -> Tensor:
        """Return the statistic for `tokens` rows."""
        return self.sums.div_(tokens)


class Peak(Magnitude):
    """Largest |x| of each channel."""

    def add(self, rows: Tensor) -> None:
        for largest in (rows.amax(0), -rows.amin(0)):  # without a copy of all rows
            torch.maximum(self.sums, largest, out=self.sums)

    def gather(self) -> None:
        distributed.largest_(self.sums)

    def mean(self, tokens: int) -> Tensor:
        return self.sums


class Square:
    """Mean x² of each channel. The sums of batches are added up in float64."""

    def __init__(self, in_features: int, device: torch.device):
        self.none, self.batches = torch.zeros(in_features, device=device), []

    def add(self, rows: Tensor) -> None:
        self.batches.append(rows.square().sum(0))

    def gather(self) -> None:
        self.batches = [sums for batches in distributed.all_gather(self.batches) for sums in batches]

    def total(self) -> Tensor:
        """Return Σx², float64 `[in]`, on the host, because not every device has float64."""
        return torch.stack(self.batches or [self.none]).cpu().double().sum(0)

    def mean(self, tokens: int) -> Tensor:
        return self.total().float() / tokens


class Fourth(Square):
    """Mean `(x / rms x)⁴` of each channel, over the first and the second half of the tokens."""

    def add(self, rows: Tensor) -> None:
        equal = rows * rows.square().mean(1, keepdim=True).clamp(min=TINY).rsqrt()
        self.batches += (half.pow(4).sum(0) for half in equal.tensor_split(2))

    def mean(self, tokens: int) -> Tensor:
        halves = torch.stack(self.batches or [self.none] * 2).tensor_split(2)
        return torch.stack([half.sum(0) for half in halves]) * (2 / tokens)


class Inputs:
    """Every `every`-th row of X, at most KEPT_INPUTS rows in all."""

    def __init__(self, in_features: int, device: torch.device):
        self.rows, self.every = torch.zeros(0, in_features, device=device), 1

    def add(self, rows: Tensor) -> None:
        self.rows = torch.cat([self.rows, rows[:: self.every]])
        self._thin()

    def gather(self) -> None:
        gathered = distributed.all_gather((self.rows, self.every))
        self.every = max(stride for _, stride in gathered)
        self.rows = torch.cat([rows[:: self.every // stride] for rows, stride in gathered])
        self._thin()

    def _thin(self) -> None:
        while len(self.rows) > KEPT_INPUTS:
            self.rows, self.every = self.rows[::2].clone(), 2 * self.every

    def mean(self, tokens: int) -> Tensor:
        return self.rows


class DriftSums:
    """Sums for a `Drift`, over the batches with a counterpart in the original model. width: number of rows of
    each of `Drift.halves`. outputs: see `Drift`. shares: tokens count here as in the site's own H, so that
    these sums are a part of it."""

    def __init__(self, in_features: int, device: torch.device, width: int, outputs: bool, shares: bool):
        self.hessian, self.tokens = Hessian(in_features, device), 0
        self.outputs, self.shares = outputs, shares
        self.halves = torch.zeros(2, width, in_features, device=device)

    def add(self, exact: Tensor, factor: Tensor, counterpart: Counterpart) -> None:
        """Add a batch. factor: the same batch in the dtype of matrix products; may be changed in place."""
        self.tokens += len(exact)
        missing = _difference(counterpart.inputs.reshape(exact.shape), exact)
        if self.outputs:
            missing = missing @ counterpart.weight.to(missing.dtype).t()
        if counterpart.missing is not None:
            missing = missing + counterpart.missing.view(missing.shape)
        factor = factor.float() if factor.dtype == torch.float16 else factor  # needs more exponents
        if counterpart.scale is not None:
            scale = counterpart.scale.reshape(-1, 1).float().clamp(min=TINY)
            missing.div_(scale)
            factor = torch.div(factor, scale, out=torch.empty_like(factor) if factor is exact else factor)
        self.hessian.add(factor)
        half = len(exact) // 2
        for sums, span in zip(self.halves, (slice(0, half), slice(half, None)), strict=True):
            _add_product(sums, missing[span].t(), factor[span])

    def gather(self) -> None:
        """Add the other ranks' sums."""
        self.tokens = sum(distributed.all_gather(self.tokens))
        self.hessian.gather()
        distributed.sum_(self.halves)


def _weighted(rows: Tensor, weights: Tensor) -> Tensor:
    """Return rows `[tokens, in]` whose products count `weights [tokens]` times."""
    rows = rows.float() if rows.dtype == torch.float16 else rows  # needs more exponents
    return rows * weights.sqrt()[:, None].to(rows.dtype)


def _difference(theirs: Tensor, ours: Tensor) -> Tensor:
    """Return `theirs - ours`, in float32 if they are float16, which has too few exponents. Rounding a
    difference of bfloat16 activations to bfloat16 again loses nothing that counts."""
    return theirs.float() - ours if ours.dtype == torch.float16 else theirs - ours


def _add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left right` to float32 sums in place. `left` is rounded to a 16-bit `right`'s dtype."""
    if right.itemsize == 2:
        sums.add_(torch.mm(left.to(right.dtype), right, out_dtype=torch.float32))
    else:
        sums.addmm_(left.float(), right)


KINDS = {
    Statistic.HESSIAN: Hessian,
    Statistic.MAGNITUDE: Magnitude,
    Statistic.PEAK: Peak,
    Statistic.SQUARE: Square,
    Statistic.FOURTH: Fourth,
    Statistic.INPUTS: Inputs,
}


class SiteSums:
    """Sums over the inputs of one site, in float32, batch by batch. needs: statistics to be measured.
    weights: how much each token counts in H, `[tokens]` in the order of the inputs; None: all alike."""

    def __init__(
        self,
        in_features: int,
        device: torch.device,
        needs: Collection[Statistic] = (Statistic.HESSIAN,),
        weights: Tensor | None = None,
    ):
        self.in_features, self.device, self.weights = in_features, device, weights
        self.tokens = 0
        self.sums = {kind: make(in_features, device) for kind, make in KINDS.items() if kind in needs}
        self.drifting: DriftSums | None = None  # set by the first batch with a counterpart

    def add(self, inputs: Tensor, counterpart: Counterpart | None = None) -> None:
        """Add a batch of inputs `[..., in]`, in float32."""
        exact = inputs.reshape(-1, self.in_features)
        span = slice(self.tokens, self.tokens + len(exact))
        self.tokens = span.stop
        if not len(exact):  # no token of this batch was routed to the expert
            return
        factor = exact if exact.itemsize == 2 and widens(exact.device) else exact.float()
        rows = exact.float() if self.sums.keys() - {Statistic.HESSIAN} else factor
        with narrow_products(exact):
            if counterpart is not None and self.drifting is None:
                outputs = counterpart.weight is not None
                width = len(counterpart.weight) if outputs else self.in_features
                kind = width, outputs, counterpart.scale is None and self.weights is None
                self.drifting = DriftSums(self.in_features, self.device, *kind)
            for kind, sums in self.sums.items():
                if kind is not Statistic.HESSIAN:
                    sums.add(rows)
                elif self.weights is not None:
                    sums.add(_weighted(factor, self.weights[span]))
                elif counterpart is None or not self.drifting.shares:
                    sums.add(factor)
            if counterpart is not None:  # last, because it changes `factor`
                self.drifting.add(exact, factor, counterpart)

    def finish(self) -> SiteStatistics:
        """Return the averaged statistics of all ranks. The accumulator cannot be used afterwards."""
        self.tokens = sum(distributed.all_gather(self.tokens))
        for sums in self.sums.values():
            sums.gather()
        drifting, self.drifting = self.drifting, None
        kind = drifting and (drifting.halves.shape[1], drifting.outputs, drifting.shares)
        if kind := next(filter(None, distributed.all_gather(kind)), None):  # some ranks may have none
            drifting = drifting or DriftSums(self.in_features, self.device, *kind)
            drifting.gather()
        if drifting is not None and drifting.shares:
            self.sums[Statistic.HESSIAN].sums += drifting.hessian.sums
        tokens = max(self.tokens, 1)
        statistics = SiteStatistics(
            {kind: sums.mean(tokens) for kind, sums in self.sums.items()}, self.tokens
        )
        if drifting is not None:
            complete = drifting.tokens == self.tokens and drifting.shares
            hessian = statistics.hessian if complete else drifting.hessian.mean(drifting.tokens)
            halves = drifting.halves.mul_(2 / drifting.tokens)
            statistics[Statistic.DRIFT] = Drift(hessian, halves, drifting.outputs, drifting.tokens)
        return statistics


def gather(
    block: nn.Module,
    gathered: Mapping[Site, SiteSums],
    forward: Callable[[], object],
    counterpart: Callable[[Site], Counterpart | None] = lambda site: None,
) -> None:
    """Add the inputs of every site. forward: runs the block on all batches. counterpart: returns the current
    batch at a site in the original model."""
    with ExitStack() as stack:
        for site in gathered:
            hook = lambda module, args, site=site: gathered[site].add(args[0], counterpart(site))  # noqa: E731
            stack.enter_context(block.get_submodule(site.module).register_forward_pre_hook(hook))
        forward()
