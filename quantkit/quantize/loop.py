"""The loop. Read this first: a checkpoint flows through it one decoder block at a time.

    for each block:
        gather the statistics of its sites ▶ transform ▶ solve each site ▶ encode ▶ install what was encoded
        ▶ advance the hidden states through the block as it was written ▶ stage the block

The next block sees the decoded codes, never the solver's private floats. What comes out is assembled,
read back from disk, checked against the loop's own final hidden states, and renamed into place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from quantkit.layouts import LinearSpec
from quantkit.models.device import give_back
from quantkit.models.heap import keep_freed_pages, map_large_blocks, return_freed_pages
from quantkit.quantize import finish, importance, plan, walk
from quantkit.quantize.capture import (
    PROBE_TOKENS,
    RepeatedForward,
    Site,
    Statistics,
    SuspendedForward,
    find_sites,
    gathering,
    refuse_not_finite,
)
from quantkit.quantize.job import Job
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers import SiteStatistics, Solved
from quantkit.quantize.solvers.loss import weight_error
from quantkit.quantize.staging import disk_errors
from quantkit.quantize.states import States
from quantkit.quantize.timings import Timings
from quantkit.quantize.transforms import BlockView, Transformed

FORWARDS = {"suspend": SuspendedForward, "repeat": RepeatedForward}


def run(job: Job, progress: Progress) -> finish.Summary:
    """Quantize the job's checkpoint into its output folder; `job.prepare` has checked all it could.

    Raises QuantkitError; staged blocks survive any error, and the output appears whole or not at all.
    """
    if not any(row.grid for row in job.specs):
        return encode([job], progress)[0]
    timings = Timings(job.skeleton.device)
    (map_large_blocks if job.method.needs else keep_freed_pages)()
    staging = job.staging
    with disk_errors(staging.folder), staging.opened(job.fingerprint, job.request.resume):
        with timings("load"):
            job.skeleton.load_rest()
            job.method.output.install_rest(job, progress)
        states = _embed(job)
        job.skeleton.embed(job.batches[0][:1, :PROBE_TOKENS])  # records the arguments of the probe
        count = len(job.skeleton.blocks)
        done = [job.staging.is_done(index) for index in range(count)]
        progress.start(count, sum(done))
        source = _source(job, done)
        for index, block in walk.blocks(job.skeleton, source, timings):
            if done[index]:
                _advance(states, (job.skeleton.run_block(index, hidden) for hidden in states), timings)
            else:
                job = _quantize_with_room(job, index, block, states, timings, progress)
            if job.source_sha256.done():
                staging.sign(job.identity)
            progress.block(index, replayed=done[index])
        with timings("write"):
            staging.wait()
        with timings("hash"):
            staging.sign(job.identity)
        summary = finish.finish(job, states[0], timings, progress)
        job.skeleton.free_rest()
        return summary


def run_all(jobs: Sequence[Job], progress: Progress) -> list[finish.Summary]:
    """Several jobs of one command: together where no solver is at work, else one after another."""
    if not any(row.grid for job in jobs for row in job.specs):
        return encode(jobs, progress)
    summaries = []
    for job in jobs:
        if len(jobs) > 1:
            progress.phase(f"making {job.staging.output}")
        summaries.append(run(job, progress))
    return summaries


def encode(jobs: Sequence[Job], progress: Progress) -> list[finish.Summary]:
    """Files of one model in whose blocks no solver has anything to do: encoded as they are written."""
    job, timings = jobs[0], Timings(jobs[0].skeleton.device)
    keep_freed_pages()
    with ExitStack() as stack:
        for one in jobs:
            stack.enter_context(disk_errors(one.staging.folder, "run the same command again"))
            stack.enter_context(one.staging.opened(one.fingerprint, resume=False))
            stack.callback(one.staging.discard)
        imatrix = job.method.output.imatrix
        if job.method.output.gathers:
            from quantkit.quantize import imatrix_job

            gathered = importance.gather(job.skeleton, job.batches, progress, timings)
            imatrix = imatrix_job.as_imatrix(gathered, job.method.output.linears, job.calibration)
            job.skeleton.free_rest()
        return finish.encode(jobs, imatrix, timings, progress)


def _embed(job: Job) -> States:
    """Hidden states that enter the first block."""
    execution = job.plan.execution
    batches = (job.skeleton.embed(ids) for ids in job.batches)
    return States(batches, execution.torch_device, execution.states == "host")


def _quantize_with_room(
    job: Job, index: int, block: nn.Module, states: States, timings: Timings, progress: Progress
) -> Job:
    """`_quantize`; where the device's memory runs out, once more in the most frugal way, which the job goes
    on with then.

    Raises QuantkitError (exit code 5) where that is not enough.
    """
    execution, before = job.plan.execution, states.changes
    less = plan.frugal(execution)
    try:
        _quantize(job, index, block, states, timings, progress)
        return job
    except torch.OutOfMemoryError as error:
        if less is None or states.changes != before:
            raise plan.out_of_memory(execution, index) from error
    # out of the handler: its traceback would keep the tensors of the first attempt alive
    note = f"{execution.device} ran out of memory in block {index + 1}: goes on with --sequential repeat "
    note += "--states host"
    progress.warn(note)
    timings.notes.append(note)
    states.move_to_host()
    give_back(execution.torch_device)
    job = replace(job, plan=replace(job.plan, execution=less))
    block = job.skeleton.load_block(index, decoded=True)
    return _quantize_with_room(job, index, block, states, timings, progress)


def _source(job: Job, done: Sequence[bool]) -> Callable[[int], walk.Source]:
    """What an earlier run staged is read from there, to be run through as it was written."""
    return lambda index: (finish.staged_checkpoint(job, index), False) if done[index] else (None, True)


def _quantize(
    job: Job, index: int, module: nn.Module, states: States, timings: Timings, progress: Progress
) -> None:
    """Quantize one block and stage it; `states` become its outputs."""
    specs = {row.local: row for row in job.block_specs(index)}
    probe = states[0][:1, :PROBE_TOKENS]
    if job.method.needs:
        sites = find_sites(module, lambda: job.skeleton.run_block(index, probe))
    else:  # no inputs are gathered: every linear stands for itself
        sites = [Site((name,)) for name in specs]
    work = _Work(job, index, module, sites, specs, states, timings, progress)
    if job.method.transform is not None:
        outputs = _solve_transformed(work)
    elif job.method.needs:
        outputs = _solve_in_sequence(work)
    else:
        for site in work.wanted:
            work.solve(site, None)
        outputs = work.forward()
    work.keep(f"{name}.weight" for name, row in specs.items() if not row.grid and job.is_packed(row))
    _advance(states, outputs, timings)
    with timings("write"):
        tensors = {name: tensor.cpu() for name, tensor in work.tensors.items()}
        job.staging.wait()
        job.staging.write_block(index, tensors, work.record)


@dataclass
class _Work:
    """One block on its way: what is known of it, and what is to be staged."""

    job: Job
    index: int
    block: nn.Module
    sites: list[Site]
    specs: dict[str, LinearSpec]
    states: States
    timings: Timings
    progress: Progress
    tensors: dict[str, Tensor] = field(default_factory=dict)
    record: list[dict] = field(default_factory=list)

    @property
    def wanted(self) -> list[Site]:
        """Sites with something to quantize."""
        return [site for site in self.sites if any(self.specs[name].grid for name in site.linears)]

    def run(self, batch: int) -> Tensor:
        """The block's output for one batch of the calibration states."""
        return self.job.skeleton.run_block(self.index, self.states[batch])

    def forward(self) -> Iterator[Tensor]:
        """The block's outputs, batch by batch."""
        return (self.run(batch) for batch in range(len(self.states)))

    def statistics(self, site: Site) -> Statistics:
        """An empty accumulator of what the method needs to know of a site's inputs."""
        in_features = self.specs[site.linears[0]].in_features
        return Statistics(in_features, self.job.plan.execution.torch_device, self.job.method.needs)

    def solve(
        self, site: Site, statistics: SiteStatistics | None, transformed: Transformed | None = None
    ) -> None:
        """Quantize the site's linears and install what was encoded."""
        rows = [self.specs[name] for name in site.linears if self.specs[name].grid]
        weights = [self.block.get_submodule(row.local).weight.float() for row in rows]
        with self.timings("solve"):
            solver = self.job.method.solver
            solved = solver.solve(weights, [row.grid for row in rows], statistics)
        for row, weight, result in zip(rows, weights, solved, strict=True):
            if transformed:
                result = transformed.amend(row.local, result)
            with self.timings("pack"):
                parts = self.job.method.layout.encode(result.weight)
                stored = f"{row.name}.weight"
                values = self.job.skeleton.install(
                    self.index, row.local, self.job.method.layout, parts, stored
                )
            if result.error is None:
                result = replace(result, error=weight_error(weight, values))
            self.tensors.update({f"{row.name}.{part}": tensor for part, tensor in parts.items()})
            self.record.append(_recorded(row, result))
            self.progress.linear(row, result)

    def keep(self, parameters: Iterable[str]) -> None:
        """Stage parameters of the block that are not quantized but not the source's any more, either."""
        for name in parameters:
            stored, tensor = self.job.skeleton.as_stored(self.index, name)
            self.tensors[stored] = tensor.contiguous()


def _solve_in_sequence(work: _Work) -> Iterator[Tensor]:
    """Each site's statistics are gathered behind the sites that were quantized before it."""
    execution = work.job.plan.execution
    forward = FORWARDS[execution.sequential](work.block, work.wanted, work.run, len(work.states))
    try:
        for site in work.wanted:
            sums = work.statistics(site)
            for batch in _timed(forward.inputs(site), work.timings):
                with work.timings("hessian", wait=False):
                    sums.add(batch)
            work.solve(site, _finished(sums, site, work))
    except BaseException:
        forward.close()
        raise
    return forward.outputs()


def _solve_transformed(work: _Work) -> Iterator[Tensor]:
    """The statistics of all sites come from one forward with the original weights."""
    job = work.job
    gathered = {site: work.statistics(site) for site in work.wanted}
    with work.timings("forward"), gathering(work.block, gathered):
        for _ in work.forward():
            pass
    probe = work.states[0][:1, :PROBE_TOKENS].float()
    with work.timings("transform"):
        transformed = job.method.transform.apply(
            BlockView(
                block=work.block,
                sites=work.sites,
                statistics={site: _finished(sums, site, work) for site, sums in gathered.items()},
                grids={name: row.grid for name, row in work.specs.items()},
                probe=lambda: job.skeleton.run_block(work.index, probe),
                stored=lambda name, tensor: tensor.to(job.skeleton.stored_dtype(work.index, name)),
            )
        )
    for site in work.wanted:
        work.solve(site, transformed.statistics.pop(site), transformed)
    work.keep(sorted(transformed.changed))
    return work.forward()


def _timed(batches: Iterable[Tensor], timings: Timings) -> Iterator[Tensor]:
    """The same batches; waiting for one counts as forward time."""
    source = iter(batches)
    while True:
        with timings("forward", wait=False):
            batch = next(source, None)
        if batch is None:
            return
        yield batch


def _finished(sums: Statistics, site: Site, work: _Work) -> SiteStatistics:
    """The site's statistics over all batches; refuses activations that are not finite, by name."""
    with work.timings("hessian"):
        statistics = sums.finish()
        return_freed_pages()  # the solver's copies are a block's peak: let them not come on top of holes
    refuse_not_finite(statistics, work.specs[site.linears[0]].name, work.job.plan.execution.dtype)
    return statistics


def _recorded(row: LinearSpec, solved: Solved) -> dict:
    """What the manifest says about a linear."""
    return {
        "name": row.name,
        "error": solved.error,
        "rtn_error": solved.rtn_error,
        "fallback": solved.fallback,
        "notes": list(solved.notes),
    } | ({} if solved.outlier_columns is None else {"outlier_columns": solved.outlier_columns})


def _advance(states: States, outputs: Iterable[Tensor], timings: Timings) -> None:
    for k, hidden in enumerate(_timed(outputs, timings)):
        states[k] = hidden
    assert k + 1 == len(states), "as many outputs as batches"
