"""Serve one trace by every strategy, in turn, on a virtual clock.

Computation is measured, waiting is skipped. The clock advances by the seconds of each step, or to the next
arrival if no request waits. So even an hour's trace takes only as long as its computation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from quantkit.errors import UNSUPPORTED, QuantkitError, first_line, one_of
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.quantize.progress import SILENT, Progress
from quantkit.serving.bench.batching import continuous, padded, trace
from quantkit.serving.bench.batching.accounting import Replay, figures
from quantkit.serving.bench.batching.trace import TraceRequest
from quantkit.serving.bench.settings import BatchingSettings
from quantkit.serving.engines import transformers as engine

SCHEMA = "quantkit.bench-batching/2"
WAITS = {"static": math.inf, "dynamic": 0.25}  # seconds that a batch waits to be full
STRATEGIES = (*WAITS, "continuous")
WARM_TOKENS = 4  # tokens per answer in the warm-up
# AttributeError: a transformers whose loop of continuous batching is another one
REFUSALS = (QuantkitError, ImportError, RuntimeError, ValueError, MemoryError, AttributeError)


def strategies(settings: BatchingSettings) -> tuple[str, ...]:
    """Return the strategies of --policies. Raises QuantkitError (exit code 2) for an unknown one."""
    names = settings.names("policies")
    return tuple(one_of(name, STRATEGIES, f"unknown policy {name!r}") for name in names)


def measure(
    checkpoint: Checkpoint,
    settings: BatchingSettings,
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
    model, facts = engine.load(checkpoint, dtype, device, settings.batch * longest)
    prompts = trace.draw_prompts(requests, checkpoint.text_config.vocab_size, settings.seed)

    def serve(name: str, requests: Sequence[TraceRequest]) -> Replay:
        """Serve `requests`, the first of the trace."""
        arguments = model, requests, prompts[: len(requests)], settings.batch
        clock = engine.clock_of(device)
        if name == "continuous":
            return continuous.serve(*arguments, clock)
        return padded.serve(*arguments, WAITS[name], clock)

    served = _Replays()
    progress.phase("warming up")
    first = [
        TraceRequest(0.0, request.prompt, min(WARM_TOKENS, request.output))
        for request in requests[: settings.batch]
    ]
    for name in names:
        served.attempt(name, partial(serve, name, first))
    served.replays.clear()
    for round_ in range(settings.repeats):
        turn = round_ % len(names)  # each round begins with another strategy
        for position, name in enumerate(names[turn:] + names[:turn]):
            progress.counting("serving", round_ * len(names) + position, settings.repeats * len(names))
            served.attempt(name, partial(serve, name, requests))
    if len(served.refused) == len(names):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in served.refused.items())
        raise QuantkitError(f"no batching ran: {reasons}", "static runs most models", UNSUPPORTED)
    return {
        "schema": SCHEMA,
        "model": checkpoint.source,
        "settings": settings.record(),
        "trace": [asdict(request) for request in requests],
        "dtype": facts.dtype,
        "device": str(device),
        "context": checkpoint.context,
        "attention": facts.attention,
        "weights": facts.weights,
        "outcomes": outcomes(names, served.replays, served.refused),
    }


@dataclass
class _Replays:
    """replays: by strategy, one per round. refused: why a strategy failed, by strategy."""

    replays: dict[str, list[Replay]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def attempt(self, name: str, serve: Callable[[], Replay]) -> None:
        """Serve a trace, unless the strategy has failed before."""
        if name in self.refused:
            return
        try:
            self.replays.setdefault(name, []).append(serve())
        except REFUSALS as error:
            self.refused[name] = first_line(error)
            del self.replays[name]


def outcomes(
    names: Sequence[str], replays: Mapping[str, Sequence[Replay]], refused: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return one record per strategy: `figures` of the round with the median throughput.

    tokens_per_second: throughput of each round. ratio: throughput divided by the first strategy's, median
    over the rounds. refused: why there are no figures.
    """
    measured = {name: [figures(replay) for replay in replays[name]] for name in names if name in replays}
    speeds = {name: [rates["tokens_per_second"] for rates in rounds] for name, rounds in measured.items()}
    first = next(iter(speeds.values()))
    records = []
    for name in names:
        outcome: dict[str, Any] = {"strategy": name, "refused": refused.get(name, "")}
        if name not in measured:
            records.append(outcome | {"figures": None, "tokens_per_second": [], "ratio": None})
            continue
        speed = speeds[name]
        median = sorted(range(len(speed)), key=speed.__getitem__)[len(speed) // 2]
        outcome |= {"figures": measured[name][median], "tokens_per_second": speed}
        outcome["ratio"] = statistics.median(a / b for a, b in zip(speed, first, strict=True))
        outcome["requests"] = [
            {"arrival": served.arrival, "first_token": served.first, "done": served.done}
            for served in replays[name][median].requests
        ]
        records.append(outcome)
    return records
