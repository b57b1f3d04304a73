"""Serve one trace by every strategy, in turn, on a virtual clock.

Computation is measured, waiting is skipped. The clock advances by the seconds of each step, or to the next
arrival if no request waits. So even an hour's trace takes only as long as its computation.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.quantize.progress import SILENT, Progress
from quantkit.serving.bench import prompts as random_prompts
from quantkit.serving.bench.attempts import Attempts
from quantkit.serving.bench.batching import continuous, padded, trace
from quantkit.serving.bench.batching.trace import Replay, TraceRequest, figures
from quantkit.serving.bench.settings import BatchingSettings
from quantkit.serving.engines import transformers as engine

SCHEMA = "quantkit.bench-batching/2"
SERVE = {  # wait: seconds that a batch waits to be full
    "static": partial(padded.serve, wait=math.inf),
    "dynamic": partial(padded.serve, wait=0.25),
    "continuous": continuous.serve,
}
WARM_TOKENS = 4  # tokens per answer in the warm-up
# AttributeError: a transformers whose loop of continuous batching is another one
FAILURES = (QuantkitError, ImportError, RuntimeError, ValueError, MemoryError, AttributeError)


def measure(
    checkpoint: Checkpoint, settings: BatchingSettings, progress: Progress = SILENT
) -> dict[str, Any]:
    """Load the model, serve the trace with every strategy; return JSON (bench-batching-2.json).

    Raises QuantkitError for a model that does not fit the memory (exit code 5), or if every strategy fails
    (4). If only some fail, their outcomes give the reason.
    """
    names = settings.names("policies")
    requests = trace.sample(settings, checkpoint.context)
    progress.phase(f"loading {checkpoint.source}")
    longest = max(request.prompt + request.output for request in requests)
    model, facts = engine.load(checkpoint, settings, settings.batch * longest)
    lengths = [request.prompt for request in requests]
    prompts = random_prompts.draw(lengths, checkpoint.text_config.vocab_size, f"{settings.seed} tokens")
    attempts = Attempts(names, FAILURES, model.device)
    progress.phase("warming up")
    batch = requests[: settings.batch]
    warm_up = [TraceRequest(0.0, request.prompt, min(WARM_TOKENS, request.output)) for request in batch]
    attempts.turn(lambda name: SERVE[name](model, warm_up, prompts, settings.batch))
    replays: dict[str, list[Replay]] = {name: [] for name in names}
    for index in range(settings.repeats):
        progress.counting("serving, in rounds", index, settings.repeats)
        turn = attempts.turn(
            lambda name: SERVE[name](model, requests, prompts, settings.batch), first=index % len(names)
        )
        for name, replay in turn.items():
            replays[name].append(replay)
    if len(attempts.refused) == len(names):
        raise attempts.failure("batching", "static runs most models")
    return {
        "schema": SCHEMA,
        "model": checkpoint.source,
        "settings": settings.record(),
        "trace": [asdict(request) for request in requests],
        "dtype": facts.dtype,
        "device": facts.device,
        "context": checkpoint.context,
        "attention": facts.attention,
        "weights": facts.weights,
        "outcomes": outcomes(replays, attempts.refused),
    }


def outcomes(replays: Mapping[str, Sequence[Replay]], refused: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return one record per strategy: `figures` of the round with the median throughput.

    replays: rounds by strategy. refused: why there are no figures, by strategy. tokens_per_second: throughput
    of each round. ratio: throughput divided by that of the first strategy that ran, median over the rounds.
    """
    records: list[dict[str, Any]] = []
    first: list[float] = []
    for name, rounds in replays.items():
        record = {"strategy": name, "refused": refused.get(name, "")}
        record |= {"figures": None, "tokens_per_second": [], "ratio": None}
        if name not in refused:
            measured = [figures(replay) for replay in rounds]
            speeds = [rates["tokens_per_second"] for rates in measured]
            first = first or speeds
            median = speeds.index(statistics.median_high(speeds))
            record |= {"figures": measured[median], "tokens_per_second": speeds}
            record["ratio"] = statistics.median(a / b for a, b in zip(speeds, first, strict=True))
            record["requests"] = [
                {"arrival": served.arrival, "first_token": served.first, "done": served.done}
                for served in rounds[median].requests
            ]
        records.append(record)
    return records
