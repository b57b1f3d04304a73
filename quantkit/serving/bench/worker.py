"""The process that measures one checkpoint: `python -m quantkit.serving.bench.worker`.

A pickled job on stdin; on stdout a line of JSON for whatever happened:

    {"event": "loaded", facts…, "seconds", "peak_bytes", "how"}
    {"event": "run", "batch", "prompt", "warmup", timing…, "peak_bytes"}
    {"event": "refused", "batch", "prompt", "message"}     a point that cannot run
    {"event": "failed", "message", "hint"}                 nothing more will come
    {"event": "rates", "bandwidth", "flops", "source"}
    {"event": "done"}

Its memory is its own, and when the system kills it for memory the parent lives on to say so.
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

from quantkit.errors import QuantkitError, first_line
from quantkit.models.machine.memory import return_freed_pages, room
from quantkit.serving.bench import runners
from quantkit.serving.bench.memory import Meter
from quantkit.serving.bench.settings import Point
from quantkit.serving.bench.subjects import Job

Emit = Callable[[dict[str, Any]], None]
OUT_OF_MEMORY = ("can't allocate memory", "out of memory")  # torch's words
KILL_ME_FIRST = Path("/proc/self/oom_score_adj")


def main() -> None:
    """Measure what stdin says. stdout is for events alone: what libraries print goes to stderr."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if KILL_ME_FIRST.exists():
        KILL_ME_FIRST.write_text("1000")

    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=events, flush=True)

    try:
        measure(pickle.load(sys.stdin.buffer), emit)
    except QuantkitError as error:
        emit({"event": "failed", "message": error.message, "hint": error.hint})
    except Exception as error:
        if not _memory_ran_out(error):
            raise  # its traceback is for the parent to show
        emit({"event": "failed", "message": f"memory ran out: {first_line(error)}", "hint": ""})
    events.flush()
    os._exit(0)  # engines' threads and their destructors have nothing more to say


def measure(job: Job, emit: Emit) -> None:
    """Load, warm up, run. Raises QuantkitError where the checkpoint cannot be loaded."""
    engine = runners.find(job.engine)
    device, value_bytes = engine.prepare(job)
    free, possible = room().nbytes, []
    if device is not None:  # torch is here
        from quantkit.models.machine.device import free_memory

        free = free_memory(device)
    for point in job.points:
        if why := job.refusal(point, value_bytes, engine.AT_ONCE, free):
            emit({"event": "refused", **asdict(point), "message": why})
        else:
            possible.append(point)
    if possible:
        _run_all(replace(job, points=possible), engine, device, emit)
    emit({"event": "done"})


def _run_all(job: Job, engine: ModuleType, device: Any, emit: Emit) -> None:
    meter = Meter(device)
    began = time.perf_counter()
    runner = engine.start(job)
    loaded = {"seconds": time.perf_counter() - began, "peak_bytes": meter.peak(), "how": meter.how}
    emit({"event": "loaded", **asdict(runner.facts), **loaded})
    for point in job.points:
        _run(job, point, runner, meter, emit)
    facts = runner.facts
    del runner
    gc.collect()
    return_freed_pages()
    if job.rates:
        import torch

        from quantkit.serving.bench import machine

        torch.set_num_threads(job.settings.threads)
        place, dtype = device or torch.device("cpu"), getattr(torch, facts.dtype)
        emit({"event": "rates", **machine.rates(place, dtype, facts.weight_bytes)})


def _run(job: Job, point: Point, runner: runners.Runner, meter: Meter, emit: Emit) -> None:
    """All runs of a point; memory that runs out refuses it, and the next is tried."""
    prompts = job.subject.prompts(point, job.settings.seed)
    for index in range(job.settings.warmup + job.settings.repeats):
        meter.reset()
        try:
            timing = runner.run(prompts, job.settings.tokens)
        except Exception as error:
            if not isinstance(error, QuantkitError) and not _memory_ran_out(error):
                raise
            emit({"event": "refused", **asdict(point), "message": first_line(error)})
            return
        told = {"warmup": index < job.settings.warmup, **asdict(timing), "peak_bytes": meter.peak()}
        emit({"event": "run", **asdict(point), **told})


def _memory_ran_out(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
