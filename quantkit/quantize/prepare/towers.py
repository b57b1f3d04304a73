"""Towers of other modalities and projectors: their linears rounded to nearest, since no text enters them.

They are read, solved and staged tensor by tensor behind the last block, in parts of a few megabytes, by the
same grids and in the same layout as the blocks' linears; the towers themselves stay on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quantkit.grids.distance import weight_error
from quantkit.layouts import LinearSpec
from quantkit.quantize.job import Job
from quantkit.quantize.prepare.memory import PART
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers.rtn import RtnSolver
from quantkit.quantize.timings import Timings


def quantize(job: Job, timings: Timings, progress: Progress) -> None:
    """Stage what the job has to do outside the blocks, if it has; finished parts are those of an earlier run.

    Raises QuantkitError naming the tensor that holds NaN or infinite values.
    """
    rows = [row for row in job.specs if row.block is None and (row.grid or job.material.is_packed(row))]
    done = 0
    for index, part in enumerate(_parts(rows), len(job.skeleton.blocks)):
        if not job.staging.is_done(index):
            tensors, records = {}, []
            for row in part:
                progress.counting("rounding linears of towers", done + len(records), len(rows))
                made, record = _made(job, row, timings, progress)
                tensors |= made
                records += record
            with timings("write"):
                job.staging.wait()
                job.staging.write_block(index, tensors, records)
        done += len(part)


def _parts(rows: Sequence[LinearSpec]) -> Iterator[list[LinearSpec]]:
    """The same rows in order, as many at a time as fit PART; at least one."""
    part: list[LinearSpec] = []
    for row in rows:
        if part and sum(one.weights for one in part) + row.weights > PART:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _made(
    job: Job, row: LinearSpec, timings: Timings, progress: Progress
) -> tuple[dict[str, Tensor], list[dict]]:
    """What is written of a linear, by stored name, and what the manifest says about it."""
    skeleton, layout = job.skeleton, job.method.layout
    with timings("load"):
        shape = torch.empty(row.out_features, row.in_features, device="meta")
        weight = skeleton.read(f"{row.module}.weight", shape)
    if row.grid is None:  # packed before, and not again
        return {f"{row.name}.weight": weight.t().contiguous() if row.conv1d else weight}, []
    weight = weight.to(skeleton.device).float()
    with timings("solve"):
        (solved,) = RtnSolver().solve([weight], [row.grid], None)
    with timings("pack"):
        parts = layout.encode(solved.weight)
        values = layout.values(parts).to(skeleton.dtype)
    for note in solved.notes:
        progress.warn(f"{row.name}: {note}")
    error = weight_error(weight, values)
    record = {"name": row.name, "error": error, "rtn_error": None, "weight_error": error, "fallback": None}
    tensors = {f"{row.name}.{part}": tensor.cpu() for part, tensor in parts.items()}
    return tensors, [record | {"notes": list(solved.notes)}]
