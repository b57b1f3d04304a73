"""What a search takes while it runs, told and checked before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.auto.job import Auto
from quantkit.auto.measuring import room
from quantkit.auto.solving import KEPT_IN
from quantkit.auto.units import nbytes, usual
from quantkit.quantize.prepare import plan

FEW_TOKENS = 1000  # measured on fewer, which of two results is better may be chance


@dataclass(frozen=True)
class Needs:
    """Predicted peaks in bytes. memory_bytes: where it computes, host_bytes: on the host, which is the same
    for a CPU; disk_bytes: beside the output."""

    memory_bytes: int
    host_bytes: int
    disk_bytes: int


def of(auto: Auto) -> Needs:
    """Of a prepared search: its job's own, beside as many streams as fit."""
    job_plan, streams = auto.job.plan, room(auto).nbytes
    accelerated = job_plan.execution.device != "cpu"
    return Needs(
        job_plan.memory_bytes + streams,
        job_plan.host_bytes + (0 if accelerated else streams),
        _disk(auto),
    )


def _disk(auto: Auto) -> int:
    """The larger of the blocks that wait while units are measured, and of one result beside another one's
    staged blocks and files."""
    waiting = KEPT_IN.itemsize * sum(unit.weights for unit in auto.units if unit.block is not None)
    budget = auto.budget_bytes()
    if budget is None:  # the smallest within a divergence is not known yet
        budget = nbytes(auto.units, {unit.name: usual(unit).name for unit in auto.units})
    return max(waiting, 2 * (budget + auto.fixed_bytes) + budget)


def check_disk(auto: Auto) -> None:
    """Raise QuantkitError (exit code 5) where the disk holds less than the search takes."""
    plan.check_disk(auto.folder.absolute(), of(auto).disk_bytes)


def few_tokens(auto: Auto) -> str | None:
    """A warning, where results are measured on next to nothing."""
    found = auto.windows.protocol
    if found.tokens >= FEW_TOKENS:
        return None
    more = "a longer text" if auto.request.text else "a text with --text"
    return f"{found.tokens} tokens to measure on are few: which result is better may be chance; give {more}"
