"""What one run leaves, whichever engine it was, and what many runs come to. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from quantkit.serving.specdec import theory
from quantkit.serving.specdec.theory import Step


@dataclass(frozen=True)
class Run:
    """One text of so many new tokens; the first `first_tokens` of them were there after first_seconds. ids or
    text: what they are, as the engine tells it.

    passes: of the target, for drafted tokens of which so many were accepted. steps: each pass by itself; None
    where the engine tells totals only, which then leave out what the prompt's pass yielded. seconds: the
    whole call. drafting, checking: seconds after the first tokens, between passes of the target, and from
    the start of a pass until its tokens are chosen; None where the engine does not tell them apart.
    """

    tokens: int
    seconds: float
    first_seconds: float
    first_tokens: int
    passes: int
    drafted: int
    accepted: int
    decode_seconds: float
    ids: list[int] = field(default_factory=list)
    text: str = ""
    steps: list[Step] | None = None
    drafting: float | None = None
    checking: float | None = None

    @property
    def decoded(self) -> int:
        """Tokens that came after the first ones."""
        return self.tokens - self.first_tokens


@dataclass(frozen=True)
class Spread:
    """Median over repeats, and the least and the largest of them."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        found = list(values)
        return Spread(median(found), min(found), max(found))


Repeats = Sequence[Sequence[Run]]  # by repeat, then by prompt


@dataclass(frozen=True)
class Alone:
    """The target without a draft: seconds of all texts, those of a token once decoding, tokens per second."""

    seconds: Spread
    step_seconds: Spread
    tokens_per_second: float

    @staticmethod
    def of(repeats: Repeats) -> Alone:
        steps = Spread.of(per_token(runs) for runs in repeats)
        return Alone(Spread.of(_sum(runs, "seconds") for runs in repeats), steps, 1 / steps.median)


@dataclass(frozen=True)
class Swept:
    """One k of one draft. tokens_per_step: mean; expected_tokens: by α (equation 1), for as many tokens as
    each step was really given. histogram: steps with 0 to k accepted tokens, None where only totals are told.

    cost: c; check: v (see theory.py). expected, decode: speed-up by theory and as measured, after the first
    tokens. net: speed-up of the whole call, both models' prompts included; seconds: of all texts.
    """

    k: int
    tokens_per_step: float
    expected_tokens: float
    drafted_per_step: float
    alpha: float | None
    alpha_error: float | None
    judged: int
    histogram: list[int] | None
    cost: float
    check: float
    expected: float
    decode: Spread
    net: Spread
    seconds: Spread


def sweep_of(k: int, repeats: Repeats, alone: Repeats, cost: float | None = None) -> Swept:
    """What k came to. alone: runs of the target in the same repeats; cost: c where runs do not tell it."""
    runs = [run for repeat in repeats for run in repeat]
    step = median(per_token(plain) for plain in alone)
    passes, drafted = _sum(runs, "passes"), _sum(runs, "drafted")
    rate, error, judged = _alpha(runs, k)
    decoding = max(1, sum(run.passes - (run.steps is not None) for run in runs))  # passes after the first
    each = drafted / passes if passes else 0.0
    if runs[0].drafting is not None:
        spent, checking = _sum(runs, "drafting") / decoding / step, _sum(runs, "checking") / decoding / step
        cost = spent / each if each else 0.0
    else:
        checking = _sum(runs, "decode_seconds") / decoding / step - each * cost
    tokens = _expected(runs, rate or 0.0, k)
    return Swept(
        k=k,
        tokens_per_step=_tokens(runs) / max(1, passes),
        expected_tokens=tokens,
        drafted_per_step=each,
        alpha=rate,
        alpha_error=error,
        judged=judged,
        histogram=theory.histogram(all_steps(runs), k) if runs[0].steps is not None else None,
        cost=cost,
        check=checking,
        expected=tokens / (each * cost + 1),
        decode=Spread.of(_ratios(alone, repeats, per_token)),
        net=Spread.of(_ratios(alone, repeats, _seconds_per_token)),
        seconds=Spread.of(_sum(repeat, "seconds") for repeat in repeats),
    )


def _alpha(runs: Sequence[Run], k: int) -> tuple[float | None, float | None, int]:
    """α, its standard error and from how many tokens: by likelihood, or from totals by the mean."""
    if runs[0].steps is None:
        drafted = int(_sum(runs, "drafted"))
        if not drafted:
            return None, None, 0
        yielded = 1 + _sum(runs, "accepted") / (drafted / k)  # of a pass that had k tokens to check
        return theory.acceptance_of_mean(yielded, k), None, drafted
    found = theory.acceptance(all_steps(runs))
    return (found.rate, found.error, found.judged) if found else (None, None, 0)


def _expected(runs: Sequence[Run], alpha: float, k: int) -> float:
    steps = all_steps(runs)
    if not steps:
        share = _sum(runs, "drafted") / k / max(1, _sum(runs, "passes"))  # of passes with k tokens to check
        return 1 + share * (theory.tokens_of_step(alpha, k) - 1)
    return sum(theory.tokens_of_step(alpha, step.drafted) for step in steps) / len(steps)


def all_steps(runs: Iterable[Run]) -> list[Step]:
    """Those of all runs, one after the other."""
    return [step for run in runs for step in run.steps or ()]


def _tokens(runs: Iterable[Run]) -> int:
    """Tokens that the counted passes yielded."""
    return sum(run.tokens if run.steps is not None else run.decoded for run in runs)


def per_token(runs: Iterable[Run]) -> float:
    """Seconds of a token once decoding."""
    runs = list(runs)
    return _sum(runs, "decode_seconds") / max(1, sum(run.decoded for run in runs))


def _seconds_per_token(runs: Sequence[Run]) -> float:
    return _sum(runs, "seconds") / _sum(runs, "tokens")


def _ratios(alone: Repeats, repeats: Repeats, measure: Callable[[Sequence[Run]], float]) -> list[float]:
    """Repeat by repeat: what slows the machine down meanwhile slows both."""
    return [measure(plain) / max(measure(runs), 1e-12) for plain, runs in zip(alone, repeats, strict=True)]


def _sum(runs: Iterable[Run], name: str) -> float:
    return sum(getattr(run, name) for run in runs)
