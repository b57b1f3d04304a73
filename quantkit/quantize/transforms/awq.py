"""AWQ: activation-aware scaling (Lin et al. 2023, arXiv:2306.00978, section 3.2 and equation 5).

Columns of a site's linears that meet large activations are scaled up before rounding, by
`s = mean|x|^α` normalised so that `max(s) min(s) = 1`, and the inputs scaled down by the same factors, which
are folded into whatever produces them. One α per site is searched: from 0, which changes nothing, to 1.

The loss of a candidate is the squared error of the site's outputs, `tr(dW H dWᵀ)` with
`dW = Q(W s) / s - W`: quadratic in dW, so the second moments H stand for the calibration tokens, and their
number does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from quantkit.grids.grid import Grid
from quantkit.grids.parallel import elements_at_once
from quantkit.quantize.capture import Site
from quantkit.quantize.solvers.loss import row_losses
from quantkit.quantize.transforms import BlockView, Transformed
from quantkit.quantize.transforms.fold import Producer, assign, find_producer
from quantkit.quantize.transforms.stored import divided, in_float32

ROWS = 512  # rows looked at together, at least
SCALE_MIN = 1e-4  # of s before normalisation: a channel that hardly lives is not scaled away


@dataclass(frozen=True)
class AwqTransform:
    """n_grid: how many values of α are tried, 0 and 1 among them."""

    n_grid: int = 20
    needs = frozenset({"hessian", "magnitude"})

    def apply(self, view: BlockView) -> Transformed:
        """Scale every site that gains by it; one without a foldable producer stays as it is, and says so."""
        result = Transformed(statistics=dict(view.statistics))
        with in_float32(view, result.changed):
            wanted = [site for site in view.sites if site in view.statistics]
            producers = {site: find_producer(view, site) for site in wanted}
            for site, producer in producers.items():
                self._scale(view, site, producer, result)
        return result

    def _scale(self, view: BlockView, site: Site, producer: Producer | None, result: Transformed) -> None:
        names = [name for name in site.linears if view.grids[name]]
        weights = [view.block.get_submodule(name).weight for name in names]
        statistics = view.statistics[site]
        losses = Losses(weights, [view.grids[name].plain() for name in names], statistics.hessian)
        for name, weight, loss in zip(names, weights, losses.plain, strict=True):
            full = row_losses(weight, statistics.hessian).sum().clamp(min=1e-30)
            result.rtn_errors[name] = (loss / full).item()
        if producer is None:
            result.notes.update(dict.fromkeys(names, ("nothing to fold scales into: kept at 1",)))
            return
        scale = search(losses, producer.tied(statistics.magnitude), self.n_grid)
        if scale is None:
            return
        scale, new = divided(view, producer, scale)
        if not losses.of(scale, limit=sum(losses.plain)) < sum(losses.plain):
            return
        new |= {f"{name}.weight": view.block.get_submodule(name).weight * scale for name in site.linears}
        for name, tensor in new.items():
            assign(view.block, name, tensor)
        result.changed.update(new)
        result.statistics[site] = replace(
            statistics, hessian=statistics.hessian / scale / scale[:, None], magnitude=None
        )


class Losses:
    """`tr(dW H dWᵀ)` of a site's linears under scales of its inputs, `dW = Q(W s) / s - W`.

    weights: `[out_k, in]` float32. plain: the loss of each linear as it is, without a scale. Groups are
    fitted one by one, also where they depend on one another (double quantization).
    Rows lose independently and never less than nothing, so a scale is given up once the rows looked at
    have lost more than a limit: those that lose most come first.
    """

    def __init__(self, weights: Sequence[Tensor], grids: Sequence[Grid], hessian: Tensor):
        self.hessian = hessian
        chunks = [
            (part, grid, k)
            for k, (weight, grid) in enumerate(zip(weights, grids, strict=True))
            for part in weight.split(max(ROWS, elements_at_once(weight.device) // weight.shape[1]))
        ]
        lost = [self._chunk(part, grid, None) for part, grid, _ in chunks]
        self.plain = [
            sum(loss for loss, chunk in zip(lost, chunks, strict=True) if chunk[2] == k)
            for k in range(len(weights))
        ]
        self._chunks = [chunks[k][:2] for k in sorted(range(len(chunks)), key=lambda k: -lost[k].item())]

    def _chunk(self, weight: Tensor, grid: Grid, scale: Tensor | None) -> Tensor:
        scaled = weight.clone() if scale is None else weight * scale
        groups = scaled.view(-1, grid.group_size)
        values = grid.nearest(groups, grid.fit(groups)).view(weight.shape)
        delta = (values if scale is None else values.div_(scale)).sub_(weight)
        return row_losses(delta, self.hessian).sum()

    def of(self, scale: Tensor, limit: float = math.inf) -> float:
        """The loss of all linears under `scale [in]`; anything above `limit` if it is above that."""
        total = 0.0
        for weight, grid in self._chunks:
            total += self._chunk(weight, grid, scale).item()
            if total > limit:
                break
        return total


def search(losses: Losses, magnitude: Tensor, n_grid: int) -> Tensor | None:
    """The scale `[in]` of least loss for the linears of a site; None where no scaling is best.

    magnitude: mean |x| of each channel, `[in]`. Of equal losses the smaller α wins. Middle exponents, the
    likely ones, come first, so that others are given up early.
    """
    best, best_loss, chosen = None, float(sum(losses.plain)), 0
    for k in sorted(range(1, n_grid), key=lambda k: abs(k - n_grid / 2)):
        scale = candidate(magnitude, k / (n_grid - 1))
        loss = losses.of(scale, limit=best_loss)
        if loss < best_loss or (loss == best_loss and k < chosen):  # not a number loses
            best, best_loss, chosen = scale, loss, k
    return best


def candidate(magnitude: Tensor, alpha: float) -> Tensor:
    """`s = mean|x|^α`, normalised so that its largest and smallest value are each other's inverse."""
    scale = magnitude.pow(alpha).clamp(min=SCALE_MIN)
    return scale / (scale.max() * scale.min()).sqrt()
