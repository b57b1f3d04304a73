"""The process that measures one checkpoint: `python -m quantkit.serving.bench.worker`.

It reads a pickled `Job` from stdin and writes a line of JSON for every event to stdout:

    {"event": "loaded", facts…, "seconds", "peak_bytes", "how"}
    {"event": "run", "batch", "prompt", "warmup", timing…, "peak_bytes"}
    {"event": "refused", "batch", "prompt", "message"}     a point that cannot run
    {"event": "failed", "message"}                         nothing more will come
    {"event": "rates", "bandwidth", "flops"}
    {"event": "done"}

A separate process makes peak memory exact. If the system kills it for memory, the parent can report that.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from quantkit.errors import QuantkitError, first_line, memory_ran_out
from quantkit.models.machine.device import free_memory
from quantkit.models.machine.memory import return_freed_pages
from quantkit.serving.bench import machine, runners
from quantkit.serving.bench.memory import Meter
from quantkit.serving.bench.subjects import Job

Emit = Callable[[dict[str, Any]], None]
CPU = torch.device("cpu")
KILL_ME_FIRST = Path("/proc/self/oom_score_adj")


def main() -> None:
    """Measure the job on stdin. Only events go to stdout; output of libraries goes to stderr."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if KILL_ME_FIRST.exists():
        KILL_ME_FIRST.write_text("1000")

    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=events, flush=True)

    try:
        measure(pickle.load(sys.stdin.buffer), emit)
    except QuantkitError as error:
        emit({"event": "failed", "message": error.message + (f" ({error.hint})" if error.hint else "")})
    except Exception as error:
        if not memory_ran_out(error):
            raise  # the parent shows the traceback
        emit({"event": "failed", "message": f"memory ran out: {first_line(error)}"})
    events.flush()
    os._exit(0)  # skip destructors of engines' threads


def measure(job: Job, emit: Emit) -> None:
    """Load the checkpoint, then warm up and run each point. Raises QuantkitError if it cannot be loaded."""
    engine = runners.find(job.engine)
    torch.set_num_threads(job.settings.cores)
    device, value_bytes = engine.prepare(job)
    free, possible = free_memory(device or CPU), []
    for point in job.points:
        if why := job.refusal(point, value_bytes, free):
            emit({"event": "refused", **asdict(point), "message": why})
        else:
            possible.append(point)
    if possible:
        _run_all(replace(job, points=possible), engine, device, emit)
    emit({"event": "done"})


def _run_all(job: Job, engine: ModuleType, device: torch.device | None, emit: Emit) -> None:
    """Run every point, then measure the machine. device: None where torch does not compute."""
    meter = Meter(device)
    began = time.perf_counter()
    runner = engine.Runner(job)
    facts = runner.facts
    loaded = {"seconds": time.perf_counter() - began, "peak_bytes": meter.peak(), "how": meter.how}
    emit({"event": "loaded", **asdict(facts), **loaded})
    for point in job.points:
        prompts = job.subject.prompts(point, job.settings.seed)
        for index in range(job.settings.warmup + job.settings.repeats):
            meter.reset()
            try:
                timing = runner.run(prompts, job.settings.tokens)
            except Exception as error:
                if not isinstance(error, QuantkitError) and not memory_ran_out(error):
                    raise
                emit({"event": "refused", **asdict(point), "message": first_line(error)})
                break
            run = {"warmup": index < job.settings.warmup, **asdict(timing), "peak_bytes": meter.peak()}
            emit({"event": "run", **asdict(point), **run})
    del runner
    gc.collect()
    return_freed_pages()
    rates = machine.rates(device or CPU, getattr(torch, facts.dtype), facts.weight_bytes)
    emit({"event": "rates", **rates})


if __name__ == "__main__":
    main()
