"""Turn staged blocks into a published checkpoint: merge, describe, read back, verify, rename."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit import __version__
from quantkit.errors import VERIFICATION, QuantkitError, first_line, require
from quantkit.grids.distance import token_distances
from quantkit.inspection.record import activations
from quantkit.models.files import headers, untrusted
from quantkit.models.files.open import check_unchanged, open_checkpoint
from quantkit.models.machine import distributed
from quantkit.models.machine.device import fallbacks
from quantkit.models.machine.expert_share import expert_of
from quantkit.models.machine.memory import mapped, return_freed_pages
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import importance, walk
from quantkit.quantize.calibrate.states import HERE, Place
from quantkit.quantize.job import Job
from quantkit.quantize.outputs import Draft, ExpertTokens, Loss, Summary, loss
from quantkit.quantize.outputs.folder import TIMINGS
from quantkit.quantize.progress import Progress
from quantkit.quantize.timings import Timings

LOSS, VERIFY = "measuring the loss: the original model", "verifying what was written"
LAST = slice(-8, None)  # tokens whose logits are compared: they depend on final norm and head
# Largest relative difference of a token between the loop and the files read back. Both compute the same
# values in the same order; the slack is for devices whose kernels are not bit-reproducible.
VERIFY_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}
FAULTY = "the disk or memory may be faulty; --resume writes and checks it again. Please report this"


def finish(
    jobs: Sequence[Job], final_states: Tensor | None, timings: Timings, progress: Progress
) -> list[Summary]:
    """Assemble the outputs of one source in their staging folders, verify and publish them.

    final_states: `[batch, tokens, hidden]`, the loop's own for the first batch of the only job; None if no
    linear has a solver and the outputs encode all tensors in one pass over the source. Frees the jobs'
    skeleton. A job killed in this function repeats all of it when resumed.
    """
    progress.phase("writing the checkpoint")
    drafts = [Draft(job.method.output, job.material, manifest(job)) for job in jobs]
    with timings("write"), ExitStack() as assembled:
        for job in jobs:
            assembled.enter_context(job.staging.assemble())
        drafts[0].output.write(drafts, progress)
    check_unchanged(jobs[0].checkpoint)  # before the disk is blamed
    reference = None if final_states is None else jobs[0].skeleton.logits(final_states[0, LAST])
    jobs[0].skeleton.free()  # no second embedding next to the original's or the written one
    expected = None
    if jobs[0].held_back:
        progress.phase(LOSS)
        with timings("loss"):
            expected = loss.of_original(jobs[0], partial(progress.counting, LOSS))
    return_freed_pages(also_kept=True)
    timings.notes += fallbacks
    progress.phase(VERIFY)
    summaries = []
    for job, draft in zip(jobs, drafts, strict=True):
        with timings("verify"):
            measured = _verify(job, final_states, reference, expected, progress)
        dtype = job.plan.execution.dtype
        if expected and (warning := loss.warning(measured, job.request.method.options, dtype)):
            progress.warn(f"{job.staging.output.name}: {warning}" if len(jobs) > 1 else warning)
        summaries.append(summarize(job, draft.manifest, timings, measured))
        draft.output.describe(draft, summaries[-1])
        job.staging.publish()
    return summaries


def manifest(job: Job) -> dict:
    """Return the manifest. It does not depend on time or place."""
    by_name = {record["name"]: record for record in job.staging.records()}
    linears = []
    for spec in job.specs:
        named = {"name": spec.name, "shape": [spec.out_features, spec.in_features]}
        if spec.kept:
            linears.append(named | {"kept": spec.kept})
        elif spec.grid:
            linears.append(named | {"grid": asdict(spec.grid)} | by_name[spec.name])
    several = {"ranks": distributed.count()} if distributed.count() > 1 else {}
    described = {
        "schema": "quantkit.manifest/1",
        "quantkit": __version__,
        "source": {"name": Path(job.request.source).name, "sha256": job.source_sha256.result()},
        "method": job.method.name,
        "job": job.identity,
        **several,
        "linears": linears,
    }
    more = {"kept_parameters": job.kept_parameters, "searched": job.request.searched}
    more["notes"] = [*job.method.notes, *fallbacks]
    return described | {key: value for key, value in more.items() if value}


def _verify(
    job: Job, states: Tensor | None, logits: Tensor | None, expected: loss.Expected | None, progress: Progress
) -> Loss | None:
    """Read the output back and run the loop's first batch and the held-back tokens through it, block by
    block. Return the loss on the held-back tokens. states, logits: of the first batch; None: not known, then
    only check that the output is complete. expected: predictions of the original model.
    """
    path = job.staging.assembled
    written = open_checkpoint(str(path), trust_remote_code=job.request.trust_remote_code)
    skeleton = Skeleton(written, job.skeleton.dtype, job.skeleton.device)
    skeleton.names.check_complete()
    batches = [] if states is None else job.batches[:1]
    batches += [expected.held_back.tokens] if expected else []
    if not batches:
        return None
    with mapped():
        skeleton.load_rest(away=True)
    entered = partial(progress.counting, VERIFY, total=skeleton.depth)
    final = walk.through(skeleton, batches, entered=entered, place=HERE)
    if states is not None:
        pairs = {"hidden states": (final[0], states), "logits": (skeleton.logits(final[0][0, LAST]), logits)}
        refuse_unlike(pairs, job.plan.execution.dtype, path)
    return loss.of_output(expected, skeleton, final[len(batches) - 1]) if expected else None


def refuse_unlike(pairs: Mapping[str, tuple[Tensor, Tensor]], dtype: str, path: Path) -> None:
    """Raise QuantkitError (exit code 6) if values computed from the files at `path` differ from the
    expected. pairs: name -> (computed, expected)."""
    for name, (computed, expected) in pairs.items():
        difference = token_distances(computed, expected).max().item()
        what = f"the checkpoint read back from {path} computes {name} that differ by {difference:.2g} "
        fits = difference <= VERIFY_TOLERANCE[dtype]
        require(fits, what + "from the expected ones", FAULTY, VERIFICATION)


def _expert_tokens(job: Job, records: Sequence[dict]) -> ExpertTokens | None:
    """Return how many tokens reached each expert; None without experts or calibration."""
    widths = {spec.name: spec.in_features for spec in job.specs}
    routed = [(expert_of(record["name"]), record) for record in records if "tokens" in record]
    tokens = {expert: record["tokens"] for expert, record in routed}
    starved = {expert for expert, record in routed if record["tokens"] < widths[record["name"]]}
    if not tokens:
        return None
    seen = sorted(tokens.values())
    median = seen[len(seen) // 2]
    return ExpertTokens(len(seen), seen[0], median, seen[-1], len(starved), job.request.run.experts)


def of_finished(job: Job) -> Summary:
    """Return the report of a job whose output exists already, from the manifest. job: prepared as for a dry
    run. A GGUF file does not store seconds."""
    path, timings = job.method.output.paths(job.material)[0], Timings()
    try:
        if (stored := path / TIMINGS).is_file():
            seconds = untrusted.parse(untrusted.read(stored))
            timings = Timings(seconds=dict(seconds["seconds"]), notes=list(seconds["steps_down"]))
        manifest = headers.at(str(path), path).manifest
        measured = Loss(**manifest["loss"]) if manifest.get("loss") else None
        return summarize(job, manifest, timings, measured)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"the manifest or the timings of {path} are damaged: {first_line(error)}"
        raise QuantkitError(what, "make it again with --overwrite") from error


def summarize(job: Job, manifest: dict, timings: Timings, measured: Loss | None) -> Summary:
    """Return the report of a verified job. measured: its loss."""
    records = [linear for linear in manifest["linears"] if "error" in linear]

    def recorded(key: str) -> dict[str, Any]:
        return {record["name"]: record[key] for record in records if key in record}

    baselines = [record["rtn_error"] for record in records if record["rtn_error"] is not None]
    return Summary(
        source=job.request.source,
        output=str(job.method.output.paths(job.material)[0]),
        source_bytes=job.plan.source_bytes,
        output_bytes=job.plan.output_bytes,
        bits_per_weight=job.plan.bits_per_weight,
        bits_per_weight_model=job.plan.bits_per_weight_model,
        matrices=job.plan.matrices,
        linears=sum(not spec.kept for spec in job.specs),
        kept=sum(bool(spec.kept) for spec in job.specs),
        error=sum(record["error"] for record in records) / len(records) if records else None,
        rtn_error=sum(baselines) / len(baselines) if baselines else None,
        fallbacks={record["name"]: record["fallback"] for record in records if record["fallback"]},
        notes={record["name"]: record["notes"] for record in records if record["notes"]},
        kept_parameters=job.kept_parameters,
        left_out=job.material.modules if job.staging.one_file else {},
        copied=job.copied,
        experts=_expert_tokens(job, records),
        outlier_columns=recorded("outlier_columns"),
        scaled=recorded("scaled") if job.method.transform else None,
        seconds=dict(timings.seconds),
        steps_down=list(timings.notes),
        activations=activations(job.material.config),
        loss=measured,
    )


def with_importance(jobs: Sequence[Job], timings: Timings, progress: Progress) -> list[Job]:
    """Return jobs without a solver. Outputs that need importance from text get it, from one run of it."""
    imatrix, made = None, []
    for job in jobs:
        output = job.method.output
        if output.gathers and not imatrix:
            place = Place(job.plan.execution.states, job.staging.folder)
            gathered = importance.gather(job.skeleton, job.batches, progress, timings, place)
            job.skeleton.free()  # its memory is needed for encoding
            imatrix = importance.as_imatrix(gathered, output.linears, job.calibration)
        output = replace(output, imatrix=imatrix) if output.gathers else output
        made.append(replace(job, method=replace(job.method, output=output)))
    return made
