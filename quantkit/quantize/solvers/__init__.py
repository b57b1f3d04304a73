"""Solvers: choose values on a grid. They take matrices and return matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from quantkit.grids.grid import Grid, QuantizedWeight


@dataclass
class SiteStatistics:
    """Statistics of the inputs X `[tokens, in]` of one site; None: not measured.

    hessian: `H = 2 XᵀX / tokens`, `[in, in]` float32. magnitude: mean |x| of each channel, `[in]`. peak:
    largest |x| of each channel, `[in]`. square: mean x² of each channel, `[in]`. tokens: number of tokens.
    inputs: a few rows of X, evenly spaced, `[few, in]` float32. fourth: mean `(x / rms x)⁴` of each channel
    over each half of the tokens, `[2, in]`. curvatures: for each linear to be quantized, G of its outputs,
    `[out, out]` (`curvature`), or None if no gradient reached it.

    Of the tokens that also have inputs X̃ of the original model: paired, their H; None if it is that of all.
    drift, `2 (X̃ - X)ᵀX / tokens`, `[2, in, in]`, one part for each half of the tokens, to be added up.
    missing, instead of a drift where a linear has the site alone, `2 ((X̃ - X)Wᵀ + R)ᵀX / tokens`,
    `[2, out, in]`, with R the original minus the quantized model's hidden states to which that linear adds
    its output. A solver that aims at these takes them out (`aimed` in gptq.py).
    """

    hessian: Tensor | None = None
    magnitude: Tensor | None = None
    peak: Tensor | None = None
    square: Tensor | None = None
    tokens: int = 0
    paired: Tensor | None = None
    drift: Tensor | None = None
    missing: Tensor | None = None
    curvatures: tuple[Tensor | None, ...] = ()
    inputs: Tensor | None = None
    fourth: Tensor | None = None

    def divided(self, scale: Tensor) -> SiteStatistics:
        """Return the statistics of inputs divided by `scale [in]`; changes this object's tensors in place."""
        for moments in filter(lambda found: found is not None, (self.hessian, self.paired, self.drift)):
            moments.div_(scale).div_(scale[:, None])
        if self.missing is not None:
            self.missing.div_(scale)
        return replace(self, magnitude=None, peak=None if self.peak is None else self.peak / scale)


@dataclass(frozen=True)
class Solved:
    """One quantized linear and its errors.

    error: `tr(dW H dWᵀ) / tr(W H Wᵀ)`, the relative squared error of the linear's output on the calibration
    tokens, for an even sample of rows (`measured`); None without statistics: the loop then measures
    `|dW|² / |W|²` of the stored values.
    rtn_error: the same for round to nearest; None if the linear was only rounded to nearest.
    fallback: the reason why the requested solver was not used; None if it was.
    notes: other facts for the user.
    outlier_columns: number of outlier input channels, if LLM.int8 counted them.
    scaled: a transform's scale of the columns; None without one.
    weight_error: `|dW|² / |W|²` of the stored values. scaled_error: the same for the nearest scales of rows
    and columns, if a transform chose scales.
    """

    weight: QuantizedWeight
    error: float | None
    rtn_error: float | None = None
    fallback: str | None = None
    notes: tuple[str, ...] = ()
    outlier_columns: int | None = None
    scaled: dict | None = None
    weight_error: float | None = None
    scaled_error: float | None = None

    def with_input_peak(self, peak: Tensor) -> Solved:
        """Return a copy with the largest of the inputs' `peak [in]`, for layouts with an input scale."""
        return replace(self, weight=replace(self.weight, input_peak=peak.amax()))

    def record(self, name: str, tokens: int | None = None) -> dict[str, Any]:
        """Return the manifest's entry of linear `name`. tokens: routed to the linear's expert, if any."""
        optional = {
            "weight_error": self.weight_error,
            "weight_error_up_to_scales": self.scaled_error,
            "tokens": tokens,
            "outlier_columns": self.outlier_columns,
            "scaled": self.scaled,
        }
        return {
            "name": name,
            "error": self.error,
            "rtn_error": self.rtn_error,
            "fallback": self.fallback,
            "notes": list(self.notes),
        } | {key: value for key, value in optional.items() if value is not None}


def clipping(weight: QuantizedWeight) -> tuple[str, ...]:
    """Return a note for the user if scales exceed float16's range."""
    count = weight.grid.clipped(weight.params)
    return (f"{count} scales lie at the end of float16's range",) if count else ()


class Solver(Protocol):
    """needs: the fields of SiteStatistics that `solve` uses; empty for a data-free solver."""

    needs: frozenset[str]

    def solve(
        self,
        weights: Sequence[Tensor],
        grids: Sequence[Grid],
        statistics: SiteStatistics | None,
    ) -> list[Solved]:
        """Quantize weights `[out, in]` float32 of one site, given the statistics of its inputs."""


MEASURED_ROWS = 1024  # of a linear on which its errors are measured, at most
WIDTH = 128  # columns of a loss computed at a time


def measured(rows: int) -> slice:
    """Return an even sample of at most MEASURED_ROWS of a linear's rows."""
    return slice(None, None, -(-rows // MEASURED_ROWS))


def row_losses(delta: Tensor, hessian: Tensor) -> Tensor:
    """Return `dw H dwᵀ` of every row of `delta [(sites,) out, in]`, float32; reads one triangle of H."""
    total = delta.new_zeros(delta.shape[:-1])
    add = Tensor.addmm_ if delta.ndim == 2 else Tensor.baddbmm_
    for start in range(0, delta.shape[-1], WIDTH):
        block = slice(start, start + WIDTH)
        product = delta[..., block] @ hessian[..., block, block]
        if start:
            add(product, delta[..., :start], hessian[..., :start, block], alpha=2)
        total += product.mul_(delta[..., block]).sum(-1)
    return total


def loss(delta: Tensor, hessian: Tensor) -> float:
    """Return `tr(dW H dWᵀ)` for `delta [out, in]`."""
    return row_losses(delta, hessian).sum().item()
