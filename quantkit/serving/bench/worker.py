"""The process that measures one checkpoint: `python -m quantkit.serving.bench.worker`.

It reads the pickled arguments of `measure` from stdin and writes a line of JSON for every event to stdout:

    {"event": "loaded", EngineFacts…, "seconds", "peak_bytes", "how"}
    {"event": "run", "batch", "prompt", Timing…, "peak_bytes"}
    {"event": "refused", "batch", "prompt", "message"}     a workload that cannot run
    {"event": "failed", "message"}                         the last event

A separate process makes peak memory exact. If the system kills it for memory, the parent can report that.
"""

import json
import os
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from quantkit.capacity.source import cache_bytes
from quantkit.errors import QuantkitError, first_line, memory_ran_out
from quantkit.models import kv_types
from quantkit.models.machine.device import free_memory
from quantkit.serving.bench import prompts as random_prompts
from quantkit.serving.bench.measure import Subject
from quantkit.serving.bench.memory import Meter
from quantkit.serving.bench.runners import RUNNERS, Runner
from quantkit.serving.bench.settings import BenchSettings, Workload
from quantkit.serving.engines import llamacpp
from quantkit.tables import megabytes

Event = dict[str, Any]
CPU = torch.device("cpu")
KILL_ME_FIRST = Path("/proc/self/oom_score_adj")


def main() -> None:
    """Measure the workloads on stdin. Only events go to stdout; output of libraries goes to stderr."""
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with suppress(OSError):  # absent, or read-only in some containers
        KILL_ME_FIRST.write_text("1000")

    def tell(event: Event) -> None:
        print(json.dumps(event), file=stdout, flush=True)

    try:
        for event in measure(*pickle.load(sys.stdin.buffer)):
            tell(event)
    except QuantkitError as error:
        tell({"event": "failed", "message": error.message + (f" ({error.hint})" if error.hint else "")})
    except Exception as error:
        if not memory_ran_out(error):
            raise  # the parent shows its last line
        tell({"event": "failed", "message": f"memory ran out: {first_line(error)}"})
    os._exit(0)  # skip destructors of engines' threads


def measure(
    subject: Subject, engine: str, settings: BenchSettings, workloads: Sequence[Workload]
) -> Iterator[Event]:
    """Load the checkpoint; warm up and run each workload. Raises QuantkitError if it cannot be loaded."""
    runner = RUNNERS[engine](subject, settings)
    free, possible = free_memory(runner.device or CPU), []
    for work in workloads:
        if why := refusal(subject, runner, work, settings.tokens, free):
            yield {"event": "refused", **asdict(work), "message": why}
        else:
            possible.append(work)
    if not possible:
        return
    meter = Meter(runner.device)
    began = time.perf_counter()
    loaded = asdict(runner.load(possible))
    cost = {"seconds": time.perf_counter() - began, "peak_bytes": meter.peak(), "how": meter.how}
    yield {"event": "loaded", **loaded, **cost}
    for work in possible:
        seed = f"{settings.seed} {work.batch} {work.prompt}"
        prompts = random_prompts.draw([work.prompt] * work.batch, subject.vocab_size, seed)
        for index in range(settings.warmup + settings.repeats):
            meter.reset()
            try:
                timing = runner.run(prompts, settings.tokens)
            except Exception as error:
                if not isinstance(error, QuantkitError) and not memory_ran_out(error):
                    raise
                yield {"event": "refused", **asdict(work), "message": first_line(error)}
                break
            if index >= settings.warmup:
                yield {"event": "run", **asdict(work), **asdict(timing), "peak_bytes": meter.peak()}


def refusal(subject: Subject, runner: Runner, work: Workload, tokens: int, free: int) -> str | None:
    """Return why a workload of `tokens` new tokens cannot run (context or memory), or None. free: free memory
    in bytes."""
    if subject.context is not None and work.prompt + tokens > subject.context:
        needed = f"{work.prompt} prompt + {tokens} new tokens"
        return f"{needed} exceed the model's context of {subject.context}"
    decoded = int(subject.parameters * kv_types.TYPES[runner.dtype].nbytes)
    weights = subject.size["weight_bytes"] if runner.packed else decoded
    length = work.prompt + tokens if runner.device else llamacpp.padded(work.prompt + tokens)
    cache = work.batch * (cache_bytes(subject.path, length, runner.dtype) or 0)
    if weights + cache > free:
        needed = f"{megabytes(weights)} of weights, {megabytes(cache)} of keys and values"
        return f"needs {needed}; {megabytes(free)} of memory are free"
    return None


if __name__ == "__main__":
    main()
