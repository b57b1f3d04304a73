"""Chooses a candidate for each unit with an integer program.

Binary `x[u, c]`: unit u is stored as candidate c. Minimise `Σ loss[u, c] x[u, c]` with one candidate per unit
and `Σ bytes[u, c] x[u, c]` within the budget: a multiple-choice knapsack, solved to the optimum by branch and
bound (HiGHS; Huangfu and Hall 2018, through `scipy.optimize.milp`). Or minimise bytes within a given loss.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from quantkit.auto.units import Unit
from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, require
from quantkit.tables import megabytes

Losses = Mapping[tuple[str, str], float]  # by the names of unit and candidate
SOLVER_GAP = 1e-6  # relative distance from the optimum at which the solver may end
SOLVER_SECONDS = 120.0


def within_bytes(units: Sequence[Unit], losses: Losses, budget: int) -> dict[str, str]:
    """Return {unit: candidate} with the least sum of losses within `budget` bytes.

    Raises QuantkitError if even the smallest candidates take more.
    """
    refuse_too_few(units, budget)
    return _solve(units, losses, budget, by_bytes=True)


def refuse_too_few(units: Sequence[Unit], budget: int, fixed_bytes: int | None = None) -> None:
    """Raise QuantkitError if even the smallest candidates take more than `budget` bytes.

    fixed_bytes: size of all other tensors and files, if the user gave the size of the whole output.
    """
    least = sum(min(unit.candidates.values()) for unit in units)
    if least > budget:
        weights = sum(unit.weights for unit in units)
        given, smallest = (f"{8 * max(0, size) / weights:.2f} bits per weight" for size in (budget, least))
        if fixed_bytes is not None:
            given = megabytes(budget + fixed_bytes)
            smallest = f"{megabytes(least + fixed_bytes)} ({smallest})"
        what = f"{given} is too small; the smallest possible result is {smallest}"
        hint = "raise the budget, or choose another --engine; with --gpu, give less --ctx or --batch"
        raise QuantkitError(what, hint, UNSUPPORTED)


def least_loss(units: Sequence[Unit], losses: Losses) -> float:
    """Return the smallest sum of losses that candidates have."""
    return sum(min(losses[unit.name, name] for name in unit.candidates) for unit in units)


def within_loss(units: Sequence[Unit], losses: Losses, bound: float) -> dict[str, str]:
    """Return the smallest {unit: candidate} whose sum of losses is at most `bound`.

    Raises QuantkitError if even the best candidates lose more.
    """
    least = least_loss(units, losses)
    what = f"--max-kld {bound:.2g} is too small: the smallest possible divergence is {least:.2g}"
    require(least <= bound, what, "raise --max-kld, or choose another --engine", USAGE)
    return _solve(units, losses, bound, by_bytes=False)


def _undominated(unit: Unit, losses: Losses) -> list[str]:
    """Return the unit's candidates, without any that another one beats in size and loss."""
    kept: list[str] = []
    loss = {name: losses[unit.name, name] for name in unit.candidates}
    for name in sorted(unit.candidates, key=lambda name: (unit.candidates[name], loss[name])):
        if not kept or loss[name] < loss[kept[-1]]:
            kept.append(name)
    return kept


def _solve(units: Sequence[Unit], losses: Losses, bound: float, by_bytes: bool) -> dict[str, str]:
    """Return {unit: candidate} with the least loss within `bound` bytes, or the fewest bytes within a loss.

    Minimise `costs · x` with `takes · x <= bound` and one candidate per unit.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    choices = [_undominated(unit, losses) for unit in units]
    owner = np.repeat(np.arange(len(units)), list(map(len, choices)))
    one_each = csr_array((np.ones(len(owner)), (owner, np.arange(len(owner)))))
    pairs = [(unit, name) for unit, kept in zip(units, choices, strict=True) for name in kept]
    lost = [losses[unit.name, name] for unit, name in pairs]
    taken = [unit.candidates[name] for unit, name in pairs]
    costs, takes = np.array((lost, taken) if by_bytes else (taken, lost), dtype=float)
    cost_scale, take_scale = max(costs.max(), 1e-300), max(takes.max(), 1e-300)
    limit = bound / take_scale
    for _ in range(8):  # HiGHS may exceed the limit by its tolerance
        with _standard_output_kept():
            result = milp(
                costs / cost_scale,
                integrality=np.ones(len(owner)),
                bounds=Bounds(0, 1),
                constraints=[
                    LinearConstraint(one_each, 1, 1),
                    LinearConstraint(takes[None] / take_scale, -np.inf, limit),
                ],
                options={"mip_rel_gap": SOLVER_GAP, "time_limit": SOLVER_SECONDS},
            )
        if result.x is None:
            raise QuantkitError(f"the integer program has no solution: {result.message}", "raise the budget")
        chosen = [int(result.x[owner == k].argmax()) for k in range(len(units))]
        flat = np.flatnonzero(np.diff(owner, prepend=-1)) + chosen
        if takes[flat].sum() <= bound:
            return {pairs[k][0].name: pairs[k][1] for k in flat}
        limit -= (takes[flat].sum() - bound) / take_scale
    raise QuantkitError("no choice of candidates within the budget was found", "raise the budget")


@contextmanager
def _standard_output_kept() -> Iterator[None]:
    """Drop what HiGHS prints to standard output: in some steps it prints even if told not to."""
    flush = ctypes.CDLL(None).fflush
    flush(None)
    with open(os.devnull, "wb") as nothing:
        try:
            kept = os.dup(1)
            os.dup2(nothing.fileno(), 1)
        except OSError:  # closed by the caller
            yield
            return
        try:
            yield
        finally:
            flush(None)
            os.dup2(kept, 1)
            os.close(kept)
