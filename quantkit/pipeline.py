"""The loop. Read this first: a checkpoint flows through it one decoder block at a time.

    for each block:
        gather the statistics of its sites ▶ solve each site ▶ encode ▶ install what was encoded
        ▶ advance the hidden states through the block as it was written ▶ stage the block

The next block sees the decoded codes, never the solver's private floats. What comes out is assembled,
read back from disk, checked against the loop's own final hidden states, and renamed into place.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from quantkit import finish
from quantkit.capture import Hessian, RepeatedForward, Site, SuspendedForward, find_sites
from quantkit.containers.staging import disk_errors
from quantkit.errors import QuantkitError
from quantkit.heap import map_large_blocks, return_freed_pages
from quantkit.job import Job
from quantkit.progress import Progress
from quantkit.solvers import Solved
from quantkit.spec import LinearSpec
from quantkit.timings import Timings

PROBE_TOKENS = 8
FORWARDS = {"suspend": SuspendedForward, "repeat": RepeatedForward}


def run(job: Job, progress: Progress) -> finish.Summary:
    """Quantize the job's checkpoint into its output folder; `job.prepare` has checked all it could.

    Raises QuantkitError; staged blocks survive any error, and the output appears whole or not at all.
    """
    timings = Timings()
    map_large_blocks()
    staging = job.staging
    with disk_errors(staging.folder), staging.opened(job.fingerprint, job.request.resume):
        with timings("load"):
            job.skeleton.load_rest()
        states = [job.skeleton.embed(ids) for ids in job.batches]
        job.skeleton.embed(job.batches[0][:1, :PROBE_TOKENS])  # records the arguments of the probe
        count = len(job.skeleton.blocks)
        done = [job.staging.is_done(index) for index in range(count)]
        progress.start(count, sum(done))
        for index in range(count):
            step = _replay if done[index] else _quantize
            step(job, index, states, timings, progress)
            job.skeleton.free_block(index)
            progress.block(index, replayed=done[index])
        return finish.finish(job, states[0], timings, progress)


def _replay(job: Job, index: int, states: list[Tensor], timings: Timings, progress: Progress) -> None:
    """Advance through a block that an earlier run staged."""
    with timings("load"):
        finish.load_staged(job, index)
    with timings("forward"):
        for k, hidden in enumerate(states):
            states[k] = job.skeleton.run_block(index, hidden)


def _quantize(job: Job, index: int, states: list[Tensor], timings: Timings, progress: Progress) -> None:
    """Quantize one block and stage it; `states` become its outputs."""
    with timings("load"):
        block = job.skeleton.load_block(index)
    specs = {row.local: row for row in job.block_specs(index)}
    probe = states[0][:1, :PROBE_TOKENS]
    sites = find_sites(block, lambda: job.skeleton.run_block(index, probe))
    wanted = [site for site in sites if any(specs[name].grid for name in site.linears)]
    tensors: dict[str, Tensor] = {}
    record: list[dict] = []

    def solve(site: Site, hessian: Tensor | None) -> None:
        rows = [specs[name] for name in site.linears if specs[name].grid]
        modules = [block.get_submodule(row.local) for row in rows]
        with timings("solve"):
            solved = job.method.solver.solve(
                [module.weight.float() for module in modules], [row.grid for row in rows], hessian
            )
        with timings("pack"):
            for row, module, result in zip(rows, modules, solved, strict=True):
                tensors.update(_install(job, row, module, result))
                record.append(_recorded(row, result))
                progress.linear(row, result)

    if job.method.solver.needs_statistics:
        forward = FORWARDS[job.plan.execution.sequential](
            block, wanted, lambda k: job.skeleton.run_block(index, states[k]), len(states)
        )
        for site in wanted:
            width = specs[site.linears[0]].in_features
            solve(site, _hessian(forward.inputs(site), width, job, site, specs, timings))
        outputs = forward.outputs()
    else:
        for site in wanted:
            solve(site, None)
        outputs = (job.skeleton.run_block(index, hidden) for hidden in states)
    _advance(states, outputs, timings)
    with timings("write"):
        job.staging.write_block(index, {name: tensor.cpu() for name, tensor in tensors.items()}, record)


def _hessian(
    inputs: Iterable[Tensor], width: int, job: Job, site: Site, specs: dict[str, LinearSpec], timings: Timings
) -> Tensor:
    """The site's Hessian over all batches; refuses activations that are not finite, by name."""
    accumulator = Hessian(width, job.plan.execution.torch_device)
    batches = iter(inputs)
    while True:
        with timings("forward"):
            batch = next(batches, None)
        if batch is None:
            break
        with timings("hessian"):
            accumulator.add(batch)
    with timings("hessian"):
        hessian = accumulator.finish()
        return_freed_pages()  # the solver's copies are a block's peak: let them not come on top of holes
    if not torch.isfinite(hessian.diagonal()).all():
        raise QuantkitError(
            f"activations entering {specs[site.linears[0]].name} are not finite "
            f"in {job.plan.execution.dtype}",
            hint="try --dtype float32; if that fails too, the checkpoint itself overflows",
        )
    return hessian


def _install(job: Job, row: LinearSpec, module: nn.Module, solved: Solved) -> dict[str, Tensor]:
    """Encode a weight and put what the encoded tensors decode to into the running block."""
    encoded = job.method.layout.encode(solved.weight)
    values = job.method.layout.decode(encoded).values()
    module.weight = nn.Parameter(values.to(module.weight.dtype), requires_grad=False)
    return {f"{row.name}.{part}": tensor for part, tensor in encoded.items()}


def _recorded(row: LinearSpec, solved: Solved) -> dict:
    """What the manifest says about a linear."""
    return {
        "name": row.name,
        "error": solved.error,
        "rtn_error": solved.rtn_error,
        "fallback": solved.fallback,
        "notes": list(solved.notes),
    }


def _advance(states: list[Tensor], outputs: Iterable[Tensor], timings: Timings) -> None:
    source = iter(outputs)
    for k in range(len(states)):
        with timings("forward"):
            states[k] = next(source)
    for _ in source:  # runs the generator's clean-up; there is nothing left to yield
        raise AssertionError("more outputs than batches")
