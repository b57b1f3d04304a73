"""Serve one trace by every strategy, in turn, on a virtual clock.

Computation is measured, waiting is skipped. The clock advances by the seconds of each step, or to the next
arrival if no request waits. So even an hour's trace takes only as long as its computation.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from quantkit.errors import UNSUPPORTED, QuantkitError, first_line, one_of
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.quantize.progress import SILENT, Progress
from quantkit.serving.bench.batching import continuous, padded, trace
from quantkit.serving.bench.batching.accounting import Replay, figures
from quantkit.serving.bench.batching.trace import Request
from quantkit.serving.bench.settings import Batching
from quantkit.serving.engines import transformers as engine

SCHEMA = "quantkit.bench-batching/2"
WAITS = {"static": math.inf, "dynamic": 0.25}  # seconds that a batch waits to be full
STRATEGIES = (*WAITS, "continuous")
WARM_TOKENS = 4  # tokens per answer in the warm-up
# AttributeError: a transformers whose loop of continuous batching is another one
REFUSALS = (ImportError, RuntimeError, ValueError, MemoryError, AttributeError)


def strategies(settings: Batching) -> tuple[str, ...]:
    """Return the strategies of --policies. Raises QuantkitError (exit code 2) for an unknown one."""
    names = settings.names("policies")
    return tuple(one_of(name, STRATEGIES, f"unknown policy {name!r}") for name in names)


def draw_prompts(requests: Sequence[Request], vocabulary: int, seed: int) -> list[list[int]]:
    """Return random token ids for each prompt. Cost depends only on their number, except in mixtures of
    experts: routers spread random tokens more evenly over experts than text."""
    stream = random.Random(f"{seed} tokens")
    return [[stream.randrange(vocabulary) for _ in range(request.prompt)] for request in requests]


def measure(
    checkpoint: Checkpoint,
    settings: Batching,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Load the model, serve the trace with every strategy; return JSON (bench-batching-2.json).

    Raises QuantkitError for an unknown strategy (exit code 2), a model that does not fit the
    memory (5), or if every strategy fails (4). If only some fail, their outcomes give the reason.
    """
    names = strategies(settings)
    requests = trace.sample(settings, checkpoint.context)
    progress.phase(f"loading {checkpoint.source}")
    longest = max(request.prompt + request.output for request in requests)
    loaded = engine.load(checkpoint, dtype, device, settings.batch * longest)
    bench = _Bench(loaded.model, requests, settings, device)
    progress.phase("warming up")
    few = [Request(0.0, one.prompt, min(WARM_TOKENS, one.output)) for one in requests[: bench.size]]
    for name in names:
        bench.attempt(name, few)
    for round_ in range(settings.repeats):
        turn = round_ % len(names)  # each round begins with another strategy
        for place, name in enumerate(names[turn:] + names[:turn]):
            progress.counting("serving", round_ * len(names) + place, settings.repeats * len(names))
            if made := bench.attempt(name, requests):
                bench.replays.setdefault(name, []).append(made)
    if all(name in bench.refused for name in names):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in bench.refused.items())
        raise QuantkitError(f"no batching ran: {reasons}", "static runs most models", UNSUPPORTED)
    return {
        "schema": SCHEMA,
        "model": checkpoint.source,
        "settings": settings.record(),
        "trace": [asdict(request) for request in requests],
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "context": checkpoint.context,
        "attention": loaded.attention,
        "weights": loaded.kernels + (f"; {loaded.note}" if loaded.note else ""),
        "outcomes": outcomes(names, bench),
    }


@dataclass
class _Bench:
    """A loaded model and a trace. replays: by strategy. refused: why a strategy failed, by strategy."""

    model: nn.Module
    requests: Sequence[Request]
    settings: Batching
    device: torch.device
    replays: dict[str, list[Replay]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.size, self.clock = self.settings.batch, engine.clock_of(self.device)
        vocabulary = self.model.config.get_text_config().vocab_size
        self.prompts = draw_prompts(self.requests, vocabulary, self.settings.seed)

    def attempt(self, name: str, requests: Sequence[Request]) -> Replay | None:
        """Serve `requests`, the first of the trace; None if the strategy fails now or did so before."""
        if name in self.refused:
            return None
        arguments = self.model, requests, self.prompts[: len(requests)], self.size
        try:
            if name == "continuous":
                return continuous.serve(*arguments, self.clock)
            return padded.serve(*arguments, WAITS[name], self.clock)
        except (QuantkitError, *REFUSALS) as error:
            self.refused[name] = first_line(error)
        self.replays.pop(name, None)
        return None


def outcomes(names: Sequence[str], bench: _Bench) -> list[dict[str, Any]]:
    """Return one record per strategy: `figures` of the round with the median throughput.

    tokens_per_second: throughput of each round. ratio: throughput divided by the first strategy's, median
    over the rounds. refused: why there are no figures.
    """
    made = {name: [figures(replay) for replay in replays] for name, replays in bench.replays.items()}
    speeds = {name: [found["tokens_per_second"] for found in rows] for name, rows in made.items()}
    first = speeds[next(name for name in names if name in made)]
    found = []
    for name in names:
        row: dict[str, Any] = {"strategy": name, "figures": None, "tokens_per_second": [], "ratio": None}
        if own := speeds.get(name):
            middle = sorted(range(len(own)), key=own.__getitem__)[len(own) // 2]
            ratio = statistics.median(a / b for a, b in zip(own, first, strict=True))
            row |= {"figures": made[name][middle], "tokens_per_second": own, "ratio": ratio}
            row["requests"] = [
                {"arrival": served.arrival, "first_token": served.first, "done": served.done}
                for served in bench.replays[name][middle].requests
            ]
        found.append(row | {"refused": bench.refused.get(name, "")})
    return found
