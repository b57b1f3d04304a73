"""AWQ: activation-aware scaling (Lin et al. 2023, arXiv:2306.00978, section 3.2 and equation 5).

Columns with large activations are scaled up before rounding, by `s = mean|x|^α` normalised so that
`max(s) min(s) = 1`. The inputs are divided by s; the division is folded into the producer of the inputs. One
α per producer is searched, from 0 (no change) to 1.

The loss of a candidate is the squared error of the linears' outputs, `tr(dW H dWᵀ)` with
`dW = Q(W s) / s - W`. It is quadratic in dW, so the second moments H replace the calibration tokens, whatever
their number.
"""

from dataclasses import dataclass

from torch import Tensor

from quantkit.grids.ggml.search import square_root
from quantkit.layouts import Statistic
from quantkit.quantize.transforms.fold import Producer
from quantkit.quantize.transforms.scaling import ColumnScaling, Entering, Losses

LEAST_SCALE = 1e-4  # least s before normalisation


@dataclass(frozen=True)
class AwqScaling(ColumnScaling):
    """Scaling by the loss of round to nearest. n_grid: number of values of α, from 0 to 1."""

    n_grid: int = 20
    needs = frozenset({Statistic.HESSIAN, Statistic.MAGNITUDE})
    rounds = True

    def search(self, losses: Losses, producer: Producer, entering: Entering) -> Tensor | None:
        """See `ColumnScaling`."""
        magnitude = sum(statistics[Statistic.MAGNITUDE] * share for statistics, share in entering)
        return search(losses, producer.tied(magnitude), self.n_grid)


def search(losses: Losses, magnitude: Tensor, n_grid: int) -> Tensor | None:
    """Return the scale `[in]` with the least loss; None if no scaling is best.

    magnitude: mean |x| of each channel, `[in]`. Of equal losses the smaller α wins. Middle exponents are
    tried first: they are likely the best, and then others are given up early. (The loss has many minima. With
    every third exponent and then the neighbours of the best, the demo model's KL is 4 percent higher.)
    """
    best, best_loss, chosen = None, float(sum(losses.plain)), 0
    for k in sorted(range(1, n_grid), key=lambda k: abs(k - n_grid / 2)):
        scale = candidate(magnitude, k / (n_grid - 1))
        loss = losses.of(scale, limit=best_loss)
        if loss < best_loss or (loss == best_loss and k < chosen):  # not a number loses
            best, best_loss, chosen = scale, loss, k
    return best


def candidate(magnitude: Tensor, alpha: float) -> Tensor:
    """Return `s = mean|x|^α`, normalised so that `max(s) min(s) = 1`."""
    scale = magnitude.pow(alpha).clamp(min=LEAST_SCALE)
    return scale / square_root((scale.max() * scale.min())[None])
