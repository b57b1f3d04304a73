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
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, first_line, name_all
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.quantize.progress import Progress
from quantkit.serving.bench.batching import continuous, padded
from quantkit.serving.bench.batching.accounting import Replay, figures
from quantkit.serving.bench.batching.proof import Proof, compare
from quantkit.serving.bench.batching.trace import Request, Trace
from quantkit.serving.bench.machine import clock_of
from quantkit.serving.bench.settings import require_numbers
from quantkit.serving.engines import transformers as engine

SCHEMA = "quantkit.bench-batching/1"
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
        require_numbers(
            ("--batch", self.size, 1), ("wait", self.wait, 0), ("page", self.page, 4),
            ("--repeats", self.repeats, 1),
        )  # fmt: skip


def measure(
    checkpoint: Checkpoint,
    trace: Trace,
    settings: Settings,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Load the model, serve the trace with every strategy, compare the answers in float32: the versioned
    JSON, which bench-batching-1.json describes.

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
    made = {
        "schema": SCHEMA,
        "model": checkpoint.source,
        "settings": asdict(settings),
        "trace": asdict(trace),
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "context": checkpoint.context,
        "attention": loaded.attention,
        "weights": loaded.kernels + (f"; {loaded.note}" if loaded.note else ""),
    }
    exact = dtype == torch.float32 and not loaded.packed
    del loaded  # the bench has the model, and gives it away before it takes another
    progress.phase("warming up")
    bench.warm_up()
    rounds = bench.rounds(progress)
    if not bench.replays:
        said = "; ".join(f"{name}: {reason}" for name, reason in bench.refused.items())
        raise QuantkitError(f"no batching ran: {said}", "static runs most models", UNSUPPORTED)
    outcomes = bench.outcomes()
    proofs, unproven = [], "fewer than two strategies ran"
    if len(bench.replays) > 1:
        progress.phase("comparing the answers in float32")
        proofs, unproven = bench.prove(checkpoint, exact, longest)
    told = {"proofs": [asdict(proof) for proof in proofs], "unproven": unproven}
    return made | {"repeats": rounds, "outcomes": outcomes} | told


def draw_prompts(requests: Sequence[Request], vocabulary: int, seed: int) -> list[list[int]]:
    """Random tokens, as many as each request's prompt has: what is computed depends on their number alone,
    but in mixtures of experts, where random tokens are spread more evenly than text."""
    stream = random.Random(f"{seed} tokens")
    return [[stream.randrange(vocabulary) for _ in range(request.prompt)] for request in requests]


class _Bench:
    """A loaded model, a trace, the replays of every strategy so far, and why others were refused."""

    def __init__(
        self,
        model: nn.Module,
        requests: Sequence[Request],
        prompts: Sequence[Sequence[int]],
        settings: Settings,
        device: torch.device,
    ) -> None:
        self.model, self.requests, self.prompts, self.settings = model, requests, prompts, settings
        self.device, self.clock = device, clock_of(device)
        self.replays: dict[str, list[Replay]] = {}
        self.refused: dict[str, str] = {}

    def serve(self, name: str, requests: Sequence[Request]) -> Replay:
        """The first requests by one strategy."""
        settings, prompts = self.settings, self.prompts[: len(requests)]
        if name == "continuous":
            return continuous.serve(self.model, requests, prompts, settings.size, settings.page, self.clock)
        wait = settings.wait if name == "dynamic" else math.inf
        return padded.serve(self.model, requests, prompts, settings.size, wait, self.clock)

    def attempt(self, name: str, requests: Sequence[Request]) -> Replay | None:
        """The same; None, and the strategy is refused from here on, where it cannot be served so."""
        try:
            return self.serve(name, requests) if name not in self.refused else None
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
            self.attempt(name, short)

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
                if made := self.attempt(name, self.requests):
                    self.replays.setdefault(name, []).append(made)
        return self.settings.repeats

    def outcomes(self) -> list[dict[str, Any]]:
        """Of every strategy the repeat whose throughput is the median. tokens_per_second: of every repeat.
        ratio: to the first strategy's, the median over the repeats. refused: why there is none of it."""
        made = {name: [figures(replay) for replay in replays] for name, replays in self.replays.items()}
        speeds = {name: [found["tokens_per_second"] for found in rows] for name, rows in made.items()}
        names = self.settings.strategies
        first = speeds[next(name for name in names if name in made)]
        found = []
        for name in names:
            told: dict[str, Any] = {"strategy": name, "figures": None, "tokens_per_second": [], "ratio": None}
            if own := speeds.get(name):
                middle = sorted(range(len(own)), key=own.__getitem__)[len(own) // 2]
                ratio = statistics.median(a / b for a, b in zip(own, first, strict=True))
                told |= {"figures": made[name][middle], "tokens_per_second": own, "ratio": ratio}
                told["requests"] = [
                    {"arrival": served.arrival, "first_token": served.first, "done": served.done}
                    for served in self.replays[name][middle].requests
                ]
            found.append(told | {"refused": self.refused.get(name, "")})
        return found

    def prove(self, checkpoint: Checkpoint, exact: bool, longest: int) -> tuple[list[Proof], str]:
        """That the strategies wrote the same, in float32; else why nothing is proven. exact: what was
        measured was; else the first requests are served again, by decoded weights: kernels of packed ones
        round as the size of a batch has it."""
        replays = {name: self.replays[name][-1] for name in self.settings.strategies if name in self.replays}
        try:
            if not exact:
                self.model = None  # both at once may not fit
                gc.collect()
                tokens = self.settings.size * longest
                self.model = engine.load(checkpoint, torch.float32, self.device, tokens, decoded=True).model
                few = self.requests[: PROVEN * self.settings.size]
                replays = {name: self.serve(name, few) for name in replays}
        except QuantkitError as error:
            return [], error.message
        except REFUSALS as error:
            return [], first_line(error)
        answers = {name: [one.tokens for one in replay.requests] for name, replay in replays.items()}
        prompts = self.prompts[: len(next(iter(answers.values())))]
        return compare(self.model, prompts, answers), ""
