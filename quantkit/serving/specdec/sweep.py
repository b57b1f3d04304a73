"""A draft measured: every k beside the target alone, on the same prompts, interleaved; then the proof."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from quantkit.serving.specdec import runs as runs_of
from quantkit.serving.specdec import theory
from quantkit.serving.specdec.lossless import Parting, Uniformity
from quantkit.serving.specdec.pair import Footprint
from quantkit.serving.specdec.runs import Alone, Run, Swept
from quantkit.serving.specdec.settings import Settings

Tick = Callable[[], None]  # called after every run


@dataclass(frozen=True)
class Greedy:
    """Drafted texts against the target's own: how many of each, tokens compared and alike up to where texts
    parted, and where they did."""

    texts: int
    equal: int
    tokens: int
    partings: list[Parting]

    @property
    def alike(self) -> bool:
        """Whether rounding explains every parting."""
        return all(found.tie for found in self.partings)


class Engine(Protocol):
    """A target and a draft, loaded. reloads: whether it loads them anew for another k than before."""

    name: str
    reloads: bool

    def run(self, prompt: int, k: int, seed: int) -> Run:
        """Continue a prompt, by its number; k = 0: the target alone."""

    def draft_step(self) -> float | None:
        """Seconds of a drafted token, where runs do not tell them."""

    def part(self, prompt: int, k: int, own: Run, drafted: Run) -> Parting | None:
        """Where a drafted text leaves the target's own."""

    def uniformity(self, texts: list[tuple[int, list[int]]], seed: int, tick: Tick) -> Uniformity | None:
        """Whether sampled texts, (prompt, ids) each, follow the target's distribution."""


@dataclass(frozen=True)
class Best:
    """k: 0 where not drafting is best. speedup: expected, or measured."""

    k: int
    speedup: float


@dataclass(frozen=True)
class Drafting:
    """Drafting k tokens takes fixed + per_token · k steps of the target; the first is the engine's own."""

    fixed: float
    per_token: float


@dataclass(frozen=True)
class Measured:
    """A draft. alpha, cost: of all k together; drafting: what c is made of, where runs tell it.

    in_theory: the best k that α and c give, of any up to theory.MOST; measured: of those that were tried, by
    net speed-up; by_bytes: in theory where a step takes as long as its weights, as stored, take to be read,
    which is c = cost_by_bytes.
    """

    draft: str
    engine: str
    alone: Alone
    swept: list[Swept]
    alpha: float | None
    cost: float
    drafting: Drafting | None
    in_theory: Best
    measured: Best
    cost_by_bytes: float
    by_bytes: Best
    proof: Greedy | Uniformity | None
    target_memory: Footprint
    draft_memory: Footprint | None

    @property
    def slows(self) -> bool:
        """Whether no k that was tried gains anything."""
        return self.measured.speedup <= 1


def steps_of(settings: Settings) -> int:
    """Runs that a draft takes, for progress."""
    variants = 1 + len(settings.ks)
    return variants * (settings.prompts * settings.repeats + 1)


def measure(
    name: str,
    engine: Engine,
    prompts: int,
    settings: Settings,
    sizes: tuple[Footprint, Footprint | None],
    tick: Tick,
) -> Measured:
    """Warm up, run everything `settings.repeats` times, sum up, prove. prompts: how many there are."""
    for k in (0, *settings.ks):
        engine.run(0, k, settings.seed)
        tick()
    found: dict[int, list[list[Run]]] = {k: [] for k in (0, *settings.ks)}
    for repeat in range(settings.repeats):
        for runs in found.values():
            runs.append([])
        for prompt, k in _order([*found], repeat, prompts, engine.reloads):
            found[k][repeat].append(engine.run(prompt, k, _seed(settings, repeat, prompt, k)))
            tick()
    return _sum_up(name, engine, found, settings, sizes, tick)


def _order(ks: list[int], repeat: int, prompts: int, reloads: bool) -> list[tuple[int, int]]:
    """Return every (prompt, k) of a repeat: all k of a prompt, or, to load seldom, all prompts of a k."""

    def turned(by: int) -> list[int]:  # nobody is always first
        return ks[by % len(ks) :] + ks[: by % len(ks)]

    if reloads:
        return [(prompt, k) for k in turned(repeat) for prompt in range(prompts)]
    return [(prompt, k) for prompt in range(prompts) for k in turned(repeat * prompts + prompt)]


def _seed(settings: Settings, repeat: int, prompt: int, k: int) -> int:
    """One for each run: a proof of a distribution takes every text for another draw."""
    place = (repeat * settings.prompts + prompt) * (theory.MOST + 1) + k
    return (settings.seed * 1_000_003 + place) % 2**31


def _sum_up(
    name: str,
    engine: Engine,
    found: dict[int, list[list[Run]]],
    settings: Settings,
    sizes: tuple[Footprint, Footprint | None],
    tick: Tick,
) -> Measured:
    alone, target, draft = Alone.of(found[0]), *sizes
    step = engine.draft_step()
    cost = None if step is None else step / alone.step_seconds.median
    swept = [runs_of.sweep_of(k, found[k], found[0], cost) for k in settings.ks]
    alpha = _pooled_alpha(swept)
    whole = median(row.cost for row in swept) if cost is None else cost
    by_bytes = draft.stored / target.stored if draft else 0.0
    best = max(swept, key=lambda row: row.net.median)
    return Measured(
        draft=name,
        engine=engine.name,
        alone=alone,
        swept=swept,
        alpha=alpha,
        cost=whole,
        drafting=_drafting(swept) if cost is None and draft else None,
        in_theory=_in_theory(swept, alpha, whole, draft is not None),
        measured=Best(best.k, best.net.median),
        cost_by_bytes=by_bytes,
        by_bytes=_in_theory(swept, alpha, by_bytes, draft is not None),
        proof=_prove(engine, found, settings, tick),
        target_memory=target,
        draft_memory=draft,
    )


def _drafting(swept: Sequence[Swept]) -> Drafting | None:
    """None with a single k, which cannot tell the two apart."""
    points = [(row.drafted_per_step, row.drafted_per_step * row.cost) for row in swept]
    return Drafting(*theory.line(points)) if len(points) > 1 else None


def _pooled_alpha(swept: Sequence[Swept]) -> float | None:
    """Every k weighs as much as it has judged tokens."""
    known = [(row.alpha, row.judged) for row in swept if row.alpha is not None]
    judged = sum(count for _, count in known)
    return sum(rate * count for rate, count in known) / judged if judged else None


def _in_theory(swept: Sequence[Swept], alpha: float | None, cost: float, model: bool) -> Best:
    """By α and c; for a look-up, which often finds nothing to draft, of the k that were tried."""
    if alpha is None:
        return Best(0, 1.0)
    if model:
        k = theory.best_k(alpha, cost)
        return Best(k, theory.speedup(alpha, cost, k))
    tried = [Best(row.k, row.expected_tokens / (row.drafted_per_step * cost + 1)) for row in swept]
    return max([Best(0, 1.0), *tried], key=lambda best: best.speedup)


def _prove(
    engine: Engine, found: dict[int, list[list[Run]]], settings: Settings, tick: Tick
) -> Greedy | Uniformity | None:
    if settings.temperature:
        return engine.uniformity(_draws(engine, found, settings, tick), settings.seed, tick)
    partings, texts, tokens = [], 0, 0
    for k, prompt in itertools.product(settings.ks, range(len(found[0][0]))):
        own = found[0][0][prompt]
        different = {(*run.ids, run.text): run for repeat in found[k] for run in [repeat[prompt]]}
        for run in different.values():  # one: the same each time, one hopes
            texts += 1
            parted = engine.part(prompt, k, own, run)
            tokens += own.tokens if parted is None else parted.index
            partings += [] if parted is None else [parted]
    return Greedy(texts, texts - len(partings), tokens, partings)


def _draws(
    engine: Engine, found: dict[int, list[list[Run]]], settings: Settings, tick: Tick
) -> list[tuple[int, list[int]]]:
    """Sampled texts: those that were measured, and as many more as `settings.proof` asks for."""
    texts = [
        (prompt, run.ids) for k in settings.ks for repeat in found[k] for prompt, run in enumerate(repeat)
    ]
    drawn, prompts = sum(len(ids) for _, ids in texts), len(found[0][0])
    for turn in itertools.count():
        if drawn >= (settings.proof or 0):
            return texts
        prompt, k = turn % prompts, settings.ks[turn // prompts % len(settings.ks)]
        run = engine.run(prompt, k, _seed(settings, settings.repeats + turn // prompts, prompt, k))
        texts.append((prompt, run.ids))
        drawn += len(run.ids)
        tick()
