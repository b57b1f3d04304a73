"""The same requests through every strategy, in turn, on a virtual clock.

Computation is measured, waiting is not waited: the clock is advanced by what each step took, and to the next
arrival when there is nothing to do. A trace of an hour at a low rate takes as long as its computation, and
nothing else that the machine does between steps is counted.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, first_line, name_all
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.machine.device import give_back, synchronize
from quantkit.quantize.progress import Progress
from quantkit.serving.bench.batching import continuous, padded
from quantkit.serving.bench.batching.accounting import Figures, Replay, figures
from quantkit.serving.bench.batching.proof import Proof, compare
from quantkit.serving.bench.batching.trace import Request, Trace
from quantkit.serving.engines import transformers as engine

STRATEGIES = ("static", "dynamic", "continuous")
PROVEN = 2  # batches of requests, served once more in float32 where less was measured
WARM_TOKENS = 4  # of every answer of the unmeasured round
REFUSALS = (ImportError, RuntimeError, ValueError, MemoryError)


@dataclass(frozen=True)
class Settings:
    """size: sequences at once. wait: seconds that a dynamic batch's first request waits for company. page:
    tokens of a cache block. limit: seconds after which no further round begins."""

    strategies: tuple[str, ...] = STRATEGIES
    size: int = 8
    wait: float = 0.25
    page: int = 16
    repeats: int = 3
    limit: float = 600.0
    seed: int = 0

    def check(self) -> None:
        """Raise QuantkitError (exit code 2) for values that make no sense."""
        unknown = [name for name in self.strategies if name not in STRATEGIES]
        if unknown or not self.strategies:
            said = f"there is no batching {name_all(unknown)}" if unknown else "--batching names no strategy"
            raise QuantkitError(said, f"choose of {', '.join(STRATEGIES)}", USAGE)
        if len(set(self.strategies)) < len(self.strategies):
            raise QuantkitError("--batching names a strategy twice", "once is enough", USAGE)
        for name, least in (("size", 1), ("wait", 0), ("page", 4), ("repeats", 1)):
            if (value := getattr(self, name)) < least:
                raise QuantkitError(f"{name} {value} makes no sense", f"choose {least} or more", USAGE)


@dataclass(frozen=True)
class Outcome:
    """Of one strategy. figures: of the repeat whose throughput is the median. tokens_per_second: of every
    repeat. ratio: to the first strategy's, the median over the repeats. refused: why there is none of it."""

    strategy: str
    figures: Figures | None = None
    replay: Replay | None = None
    tokens_per_second: tuple[float, ...] = ()
    ratio: float | None = None
    refused: str = ""


@dataclass(frozen=True)
class Result:
    """proofs: of equal answers, in float32; unproven: why there is none."""

    model: str
    settings: Settings
    trace: Trace
    dtype: str
    device: str
    context: int | None
    attention: str
    weights: str
    repeats: int
    outcomes: tuple[Outcome, ...]
    proofs: tuple[Proof, ...]
    unproven: str = ""


def measure(
    checkpoint: Checkpoint,
    trace: Trace,
    settings: Settings,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> Result:
    """Load the model, serve the trace with every strategy, compare the answers in float32.

    Raises QuantkitError when settings make no sense (exit code 2), the model does not fit the memory (5), or
    none of the strategies can serve it (4). One that cannot is an outcome.
    """
    progress = progress or Progress()
    settings.check()
    progress.phase(f"loading {checkpoint.source}")
    longest = max(request.prompt + request.output for request in trace.requests)
    loaded = engine.load(checkpoint, dtype, device, settings.size * longest)
    prompts = draw_prompts(trace.requests, checkpoint.text_config.vocab_size, settings.seed)
    bench = _Bench(loaded.model, trace.requests, prompts, settings, device)
    attention = loaded.attention
    weights = loaded.kernels + (f"; {loaded.note}" if loaded.note else "")
    exact = dtype == torch.float32 and not loaded.packed
    del loaded  # the bench has the model, and gives it away before it takes another
    progress.phase("warming up")
    bench.warm_up()
    rounds = bench.rounds(progress)
    if not bench.replays:
        said = "; ".join(f"{name}: {reason}" for name, reason in bench.refused.items())
        raise QuantkitError(f"no batching ran: {said}", "static runs most models", UNSUPPORTED)
    outcomes = [_outcome(name, bench, settings.strategies) for name in settings.strategies]
    proofs, unproven = _prove(checkpoint, bench, exact, longest, progress)
    result = Result(
        model=checkpoint.source,
        settings=settings,
        trace=trace,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        context=checkpoint.context,
        attention=attention,
        weights=weights,
        repeats=rounds,
        outcomes=tuple(outcomes),
        proofs=tuple(proofs),
        unproven=unproven,
    )
    del bench
    gc.collect()
    give_back(device)
    return result


def draw_prompts(requests: Sequence[Request], vocabulary: int, seed: int) -> list[list[int]]:
    """Random tokens, as many as each request's prompt has: what is computed depends on their number alone,
    but in mixtures of experts, where random tokens are spread more evenly than text."""
    stream = random.Random(f"{seed} tokens")
    return [[stream.randrange(vocabulary) for _ in range(request.prompt)] for request in requests]


@dataclass
class _Bench:
    """A loaded model, a trace, and the replays so far."""

    model: nn.Module
    requests: Sequence[Request]
    prompts: Sequence[Sequence[int]]
    settings: Settings
    device: torch.device
    replays: dict[str, list[Replay]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def clock(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def serve(self, name: str, requests: Sequence[Request], prompts: Sequence[Sequence[int]]) -> Replay:
        """The requests by one strategy."""
        size = self.settings.size
        if name != "continuous":
            wait = self.settings.wait if name == "dynamic" else math.inf
            return padded.serve(self.model, requests, prompts, size, wait, self.clock)
        return continuous.serve(self.model, requests, prompts, size, self.settings.page, self.clock)

    def attempt(
        self, name: str, requests: Sequence[Request], prompts: Sequence[Sequence[int]]
    ) -> Replay | None:
        """The same; None, and the strategy is refused from here on, where it cannot be served so."""
        try:
            return self.serve(name, requests, prompts)
        except QuantkitError as error:
            self.refused[name] = error.message
        except REFUSALS as error:
            self.refused[name] = first_line(error)
        self.replays.pop(name, None)
        return None

    def warm_up(self) -> None:
        """As many requests as there are slots, and a few tokens of each, by every strategy."""
        few = self.requests[: self.settings.size]
        short = [Request(0.0, request.prompt, min(WARM_TOKENS, request.output)) for request in few]
        for name in self.settings.strategies:
            self.attempt(name, short, self.prompts[: len(short)])

    def rounds(self, progress: Progress) -> int:
        """Every strategy once a round, each round begun by another; how many rounds there were."""
        names = [name for name in self.settings.strategies if name not in self.refused]
        began, total = time.monotonic(), self.settings.repeats * len(names)
        for round_ in range(self.settings.repeats if names else 0):
            if round_ and (time.monotonic() - began) * (round_ + 1) / round_ > self.settings.limit:
                told = f"{round_} rounds instead of {self.settings.repeats}: more would pass the limit"
                progress.warn(told)
                return round_
            turn = round_ % len(names)
            for place, name in enumerate(names[turn:] + names[:turn]):
                progress.counting("serving the trace", round_ * len(names) + place, total)
                if name not in self.refused and (made := self.attempt(name, self.requests, self.prompts)):
                    self.replays.setdefault(name, []).append(made)
        return self.settings.repeats if names else 0

    def answers(self) -> dict[str, list[tuple[int, ...]]]:
        """What every strategy wrote at last."""
        return {
            name: [served.tokens for served in self.replays[name][-1].requests]
            for name in self.settings.strategies
            if name in self.replays
        }


def _outcome(name: str, bench: _Bench, names: Sequence[str]) -> Outcome:
    if name not in bench.replays:
        return Outcome(name, refused=bench.refused[name])
    made = {other: [figures(replay) for replay in bench.replays[other]] for other in bench.replays}
    first = next(other for other in names if other in made)
    speeds = [found.tokens_per_second for found in made[name]]
    middle = sorted(range(len(speeds)), key=speeds.__getitem__)[len(speeds) // 2]
    ratios = [a / b.tokens_per_second for a, b in zip(speeds, made[first], strict=True)]
    return Outcome(
        strategy=name,
        figures=made[name][middle],
        replay=bench.replays[name][middle],
        tokens_per_second=tuple(speeds),
        ratio=statistics.median(ratios),
    )


def _prove(
    checkpoint: Checkpoint, bench: _Bench, exact: bool, longest: int, progress: Progress
) -> tuple[list[Proof], str]:
    """That the strategies wrote the same, in float32. exact: what was measured was; else the first requests
    are served again, by decoded weights: kernels of packed ones round as the size of a batch has it."""
    if len(bench.replays) < 2:
        return [], "fewer than two strategies ran"
    progress.phase("comparing the answers in float32")
    if exact:
        return compare(bench.model, bench.prompts, bench.answers()), ""
    settings, names = bench.settings, tuple(bench.replays)
    bench.model = None  # both at once may not fit
    gc.collect()
    try:
        tokens = settings.size * longest
        loaded = engine.load(checkpoint, torch.float32, bench.device, tokens, decoded=True)
    except QuantkitError as error:
        return [], error.message
    few = PROVEN * settings.size
    again = _Bench(loaded.model, bench.requests[:few], bench.prompts[:few], settings, bench.device)
    try:
        again.replays = {name: [again.serve(name, again.requests, again.prompts)] for name in names}
    except REFUSALS as error:
        return [], first_line(error)
    return compare(again.model, again.prompts, again.answers()), ""
