"""From staged blocks to a published checkpoint: merge, describe, read back, verify, rename."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit import __version__
from quantkit.errors import VERIFICATION, QuantkitError
from quantkit.layouts import LinearSpec
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.containers.safetensors_folder import TensorInfo
from quantkit.models.open import open_checkpoint
from quantkit.models.skeleton import Skeleton, check_complete
from quantkit.quantize import walk
from quantkit.quantize.job import Job
from quantkit.quantize.progress import Progress
from quantkit.quantize.timings import Timings

if TYPE_CHECKING:
    from quantkit.models.llamacpp.imatrix import Imatrix

TIMINGS = "quantkit-timings.json"
VERIFY_TOKENS = 8  # whose logits are compared, too: final norm and head lie behind the hidden states
# Relative difference of hidden states between the loop and the files read back. Both compute the same
# values in the same order; the slack is for devices whose kernels are not bit-reproducible.
VERIFY_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}


@dataclass(frozen=True)
class Summary:
    """What a finished job reports. Sizes in bytes; fallbacks: linear -> reason. steps_down: what it did to
    get along with less memory than planned."""

    source: str
    output: str
    source_bytes: int
    output_bytes: int
    bits_per_weight: float
    bits_per_weight_model: float
    linears: int
    kept: int
    error: float | None
    rtn_error: float | None
    fallbacks: dict[str, str]
    notes: dict[str, list[str]]
    outlier_columns: dict[str, int]
    seconds: dict[str, float]
    steps_down: list[str]


def staged_checkpoint(job: Job, index: int) -> Checkpoint:
    """The checkpoint as it is once block `index` is staged: readable like any other."""
    infos = _remaining(job, job.block_specs(index))
    return job.checkpoint.with_tensors(infos | job.staging.infos(index), job.method.layout)


def finish(job: Job, final_states: Tensor, timings: Timings, progress: Progress) -> Summary:
    """Assemble the output beside its place, verify it, publish it.

    `final_states [batch, tokens, hidden]` are the loop's own for its first batch. A job killed in
    here does all of it again when resumed.
    """
    progress.phase("writing the checkpoint")
    records = [row for index in range(len(job.skeleton.blocks)) for row in job.staging.record(index)]
    with timings("write"):
        place = job.staging.assemble(lambda place: job.method.output.write(job, place, records))
    progress.phase("verifying what was written")
    with timings("verify"):
        _verify(job, place, final_states)
    summary = _summarize(job, records, timings)
    job.method.output.describe(job, place, summary)
    job.staging.publish()
    return summary


def encode(
    jobs: Sequence[Job], imatrix: Imatrix | None, timings: Timings, progress: Progress
) -> list[Summary]:
    """Files of one model that need no loop, in one pass over the source; then each is read back."""
    progress.phase("writing")

    def fill(rest: Sequence[Job], places: tuple[Path, ...]) -> None:
        if rest:
            rest[0].staging.assemble(lambda place: fill(rest[1:], (*places, place)))
        else:
            jobs[0].method.output.encode(list(zip(jobs, places, strict=True)), imatrix, progress)

    with timings("write"):
        fill(jobs, ())
    summaries = []
    for job in jobs:
        with timings("verify"):
            check_complete(
                Skeleton(open_checkpoint(str(job.staging.place)), torch.float32, torch.device("cpu"))
            )
        summaries.append(_summarize(job, [], timings))
        job.staging.publish()
    return summaries


def merged(job: Job) -> dict[str, TensorInfo]:
    """Every tensor of the output and where its bytes lie now: in staged blocks, or in the source."""
    infos = {name: job.checkpoint.plain(info) for name, info in _remaining(job, job.specs).items()}
    for index in range(len(job.skeleton.blocks)):
        infos.update(job.staging.infos(index))
    return infos


def _remaining(job: Job, rows: Sequence[LinearSpec]) -> dict[str, TensorInfo]:
    """The source's tensors without the weights of `rows` that are staged: quantized, or packed before."""
    staged = [row for row in rows if row.grid or job.is_packed(row)]
    gone = {name for row in staged for name in job.checkpoint.stored_as(f"{row.name}.weight")}
    return {name: info for name, info in job.checkpoint.infos.items() if name not in gone}


def manifest(job: Job, records: Sequence[dict]) -> dict:
    """How this checkpoint came to be. Nothing in it depends on time or place."""
    by_name = {record["name"]: record for record in records}
    linears = []
    for row in job.specs:
        shape = [row.out_features, row.in_features]
        if row.kept:
            linears.append({"name": row.name, "shape": shape, "kept": row.kept})
        elif row.grid:
            linears.append({"name": row.name, "shape": shape, "grid": asdict(row.grid)} | by_name[row.name])
    return {
        "schema": "quantkit.manifest/1",
        "quantkit": __version__,
        "source": {"name": Path(job.request.source).name, "sha256": job.source_sha256.result()},
        "method": job.request.method,
        "job": job.identity,
        "linears": linears,
    } | ({"notes": list(job.method.notes)} if job.method.notes else {})


def _verify(job: Job, place: Path, expected: Tensor) -> None:
    """Read it back and run the loop's first batch through it, block by block."""
    written = open_checkpoint(str(place), trust_remote_code=job.request.trust_remote_code)
    skeleton = Skeleton(written, job.skeleton.dtype, job.skeleton.device)
    skeleton.load_rest()
    hidden = skeleton.embed(job.batches[0])
    for index, _ in walk.blocks(skeleton):
        hidden = skeleton.run_block(index, hidden)
    last = slice(-VERIFY_TOKENS, None)
    logits = skeleton.logits(hidden[0, last]), job.skeleton.logits(expected[0, last])
    for what, (found, wanted) in {"hidden states": (hidden, expected), "logits": logits}.items():
        difference = (found.float() - wanted.float()).norm() / wanted.float().norm()
        if difference <= VERIFY_TOLERANCE[job.plan.execution.dtype]:
            continue
        raise QuantkitError(
            f"the checkpoint read back from {place} computes {what} that differ by {difference:.2g} "
            "from those it was made with",
            hint="the disk or memory may be faulty; --resume writes and checks it again. Please report this",
            exit_code=VERIFICATION,
        )


def _summarize(job: Job, records: list[dict], timings: Timings) -> Summary:
    baselines = [row["rtn_error"] for row in records if row["rtn_error"] is not None]
    return Summary(
        source=job.request.source,
        output=str(job.staging.output),
        source_bytes=job.plan.source_bytes,
        output_bytes=job.plan.output_bytes,
        bits_per_weight=job.plan.bits_per_weight,
        bits_per_weight_model=8 * job.plan.output_bytes / job.skeleton.parameters,
        linears=len([row for row in job.specs if not row.kept]),
        kept=len([row for row in job.specs if row.kept]),
        error=sum(row["error"] for row in records) / len(records) if records else None,
        rtn_error=sum(baselines) / len(baselines) if baselines else None,
        fallbacks={row["name"]: row["fallback"] for row in records if row["fallback"]},
        notes={row["name"]: row["notes"] for row in records if row["notes"]},
        outlier_columns={row["name"]: row["outlier_columns"] for row in records if "outlier_columns" in row},
        seconds=dict(timings.seconds),
        steps_down=list(timings.notes),
    )
