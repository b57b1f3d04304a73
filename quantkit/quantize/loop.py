"""The loop. Read this file first: a checkpoint flows through the loop one decoder block at a time.

    for each block:
        transform ▶ visit each site: measure, solve, encode, install what was encoded
        ▶ advance the hidden states through the block as it was written ▶ stage the block

The next block sees the decoded codes, never the solver's private floats. The output is assembled, read back
from disk, checked against the loop's own final hidden states, and renamed into place.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.layouts import Statistic
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import check_unchanged, watched
from quantkit.models.machine import distributed
from quantkit.models.machine.device import fallbacks, give_back
from quantkit.models.machine.memory import keep_freed_pages, map_large_blocks, mapped
from quantkit.quantize.calibrate import cache_peaks, curvature, original_every, schedule, walk
from quantkit.quantize.calibrate.curvature import Curvatures
from quantkit.quantize.calibrate.importance import of_head
from quantkit.quantize.calibrate.measure import Measuring
from quantkit.quantize.calibrate.original import Original
from quantkit.quantize.calibrate.schedule import Visit
from quantkit.quantize.calibrate.sites import PROBE_TOKENS, Block, find_sites, fused_sites
from quantkit.quantize.calibrate.states import Place, embedded
from quantkit.quantize.calibrate.view import Transformed
from quantkit.quantize.job import Job
from quantkit.quantize.outputs import Summary, finish
from quantkit.quantize.prepare import plan
from quantkit.quantize.progress import Progress
from quantkit.quantize.solving import Quantizer
from quantkit.quantize.staging.folder import disk_errors
from quantkit.quantize.staging.parts import BlockParts
from quantkit.quantize.timings import Timings
from quantkit.quantize.transforms.expert_by_expert import ExpertByExpert
from quantkit.quantize.transforms.probe import set_aside


def run(jobs: Sequence[Job], progress: Progress) -> list[Summary]:
    """Run the jobs of one command, from `job.prepare`: one after another through the loop, or in one pass
    over the source if none has a solver.

    Raises QuantkitError. Staged blocks survive any error; an output appears complete or not at all.
    """
    solved = [any(spec.grid for spec in job.specs) for job in jobs]  # else the output encodes all linears
    if not any(solved):
        return _encoded(jobs, progress)
    summaries = []
    for job, has_solver in zip(jobs, solved, strict=True):
        if len(jobs) > 1:
            progress.phase(f"making {job.staging.output}")
        if not has_solver:
            summaries += _encoded([job], progress)
            continue
        (map_large_blocks if job.method.needs else keep_freed_pages)()
        with (
            disk_errors(job.staging.folder),
            job.staging.opened(job.fingerprint, job.request.resume, lasting=bool(job.method.needs)),
            watched(job.checkpoint),
        ):
            summaries += Loop(job, progress).run()
    return summaries


def _encoded(jobs: Sequence[Job], progress: Progress) -> list[Summary]:
    """Run jobs whose outputs encode all linears, in one pass over the source."""
    keep_freed_pages()
    fallbacks.clear()  # of an earlier job of this process
    with ExitStack() as stack:
        for job in jobs:
            stack.enter_context(disk_errors(job.staging.folder, "run the same command again"))
            stack.enter_context(job.staging.opened(job.fingerprint, resume=False))
            stack.callback(job.staging.discard)
        stack.enter_context(watched(jobs[0].checkpoint))
        timings = Timings(jobs[0].skeleton.device)
        jobs = finish.with_importance(jobs, timings, progress)
        return distributed.broadcast(lambda: finish.finish(jobs, None, timings, progress))


class Loop:
    """The run of one job. `audit.py` replaces the quantizer, and reads the blocks that are done elsewhere."""

    quantizer: Callable[..., Quantizer] = Quantizer

    def __init__(self, job: Job, progress: Progress):
        self.job, self.progress = job, progress
        self.skeleton, self.method = job.skeleton, job.method
        self.execution = job.plan.execution
        self.timings = Timings(job.skeleton.device)
        fallbacks.clear()
        self.place = Place(self.execution.states, job.staging.folder)
        if self.execution.states == "disk" and self.job.request.run.states != "disk":
            note = "hidden states do not fit into memory: a file next to the output keeps them"
            progress.warn(note)
            self.timings.notes.append(note)
        with self.timings("load"), mapped():
            self.skeleton.load_rest(away=True)
            self.originals = None
            if Statistic.DRIFT in self.method.needs:
                sample = [job.batches[k] for k in self._sample()]
                self.originals = embedded(self.skeleton, sample, self.place)
        self.curvatures = self._curvatures() if Statistic.CURVATURE in self.method.needs else None
        with self.timings("load"):
            measure_head = partial(of_head, self.skeleton, job.batches, self.place)
            self.method.output.install_rest(job.material, self.method.solver, measure_head, progress)
        self.states = embedded(self.skeleton, job.batches, self.place)

    def _sample(self) -> list[int]:
        """Return the numbers of this rank's batches that the original model runs on: every n-th of all."""
        widest = max(spec.in_features for spec in self.job.specs if spec.grid)
        every = original_every(self.job.calibration.tokens.numel(), widest)
        return [at for at, k in enumerate(distributed.span(self.job.batch_count)) if k % every == 0]

    def _curvatures(self) -> Curvatures:
        """Return the curvatures of the linears in all blocks that are not staged yet."""
        left = {index: [] for index, done in enumerate(self._done()[: self.skeleton.depth]) if not done}
        for spec in self.job.specs:
            if spec.block in left and spec.grid:
                left[spec.block].append(spec.local)
        folder, batches = self.job.staging.folder, self.job.batches
        return curvature.gather(self.skeleton, left, batches, folder, self.timings, self.progress, self.place)

    def _done(self) -> list[bool]:
        """Return for each block whether an earlier run has staged it."""
        return distributed.broadcast(
            lambda: self.job.staging.done(len(self.skeleton.blocks), self.progress.warn)
        )

    def run(self) -> list[Summary]:
        """Quantize all blocks, then finish the output."""
        self.through(self._done())
        summaries = distributed.broadcast(self._finished)
        self.skeleton.free()
        return summaries

    def through(self, done: Sequence[bool]) -> None:
        """Quantize and stage the first `len(done)` blocks; those that are done run as they were written."""
        skeleton, staging = self.skeleton, self.job.staging
        self.progress.start(len(done), sum(done))

        def source(index: int) -> walk.Source:
            original = self.originals is not None or not done[index]
            return (None, True) if original else (self._written(index), False)

        for index, module in walk.blocks(skeleton, source, self.timings, range(len(done))):
            if done[index]:
                if self.originals is not None:
                    outputs = skeleton.outputs(index, self.originals)
                    self.originals.advance(self.timings.waiting("original", outputs))
                    skeleton.load_block(index, self._written(index))
                self._advance(skeleton.outputs(index, self.states))
            else:
                self._quantize_or_step_down(index, module)
            if self.job.source_sha256.done():
                staging.sign(self.job.identity)
            self.progress.block(index, replayed=done[index])
        with self.timings("write"):
            staging.wait()

    def _written(self, index: int) -> Checkpoint:
        """Return the checkpoint from which a block that is done is read: an earlier run staged it."""
        return self.job.material.with_block(index)

    def _quantize_or_step_down(self, index: int, module: nn.Module) -> None:
        """Quantize a block; if the device runs out of memory, again in the way that needs the least.

        Raises QuantkitError (exit code 5) if that fails too.
        """
        less, self.advancing = plan.frugal(self.execution), False
        try:
            return self._quantize(index, module)
        except torch.OutOfMemoryError as error:
            if less is None or self.advancing or distributed.count() > 1:
                raise plan.out_of_memory(self.execution, index) from error
        # outside the handler: its traceback keeps the tensors of the first attempt
        note = f"{self.execution.device} ran out of memory in block {index + 1}: continuing with "
        note += f"--sequential repeat --states {less.states}"
        self.progress.warn(note)
        self.timings.notes.append(note)
        self.job.staging.wait()
        for states in filter(None, (self.states, self.originals)):
            states.move_to_host()
        give_back(self.skeleton.device)
        self.execution = less
        self._quantize_or_step_down(index, self.skeleton.load_block(index, decoded=True))

    def _finished(self) -> list[Summary]:
        with self.timings("hash"):
            self.job.staging.sign(self.job.identity)
        final, self.states, self.originals = self.states[0], None, None  # the others are not needed any more
        return finish.finish([self.job], final, self.timings, self.progress)

    def _quantize(self, index: int, module: nn.Module) -> None:
        """Quantize and stage one block. The hidden states are replaced by its outputs."""
        block, parts = self._block(index, module), BlockParts(self.job.staging, index)
        records: list[dict] = []
        curvatures = self.curvatures if index < self.skeleton.depth else None  # the head has none
        with self._original(block) as original:
            given = self.method.needs, self.job.request.run.experts, self.timings, self.job.batch_count
            measuring = Measuring(
                self.skeleton, block, self.states, self.execution, *given, original, curvatures
            )
            transformed, visits = self._transform(measuring, parts)
            self._stage_changed(block, transformed, parts)
            given = self.method.solver, self.method.layout, self.timings, block, parts
            quantizer = self.quantizer(self.skeleton, *given, transformed, curvatures)
            caching = Statistic.CACHE in self.method.needs
            with closing(visits), cache_peaks.watched(module) if caching else nullcontext({}) as caches:
                for visit in visits:
                    for spec, record in quantizer.visit(visit):
                        records.append(record)
                        self.progress.linear(spec, record)
                    del visit  # frees its statistics before the next are measured
            if original:
                self.originals.advance(original.leaving)
        parts.add(cache_peaks.scales(caches, block.specs.values(), self.method.layout.cache_scales))
        check_unchanged(self.job.checkpoint)  # before the block is staged
        with self.timings("write"):
            parts.finish(records)
        if self.curvatures:
            self.curvatures.done_with(index - 1)  # that block is on the disk by now

    def _block(self, index: int, module: nn.Module) -> Block:
        specs = {spec.local: spec for spec in self.job.specs if spec.block == index}
        if not self.method.needs:  # no inputs are gathered
            return Block(index, module, specs, fused_sites(specs))
        probe = distributed.broadcast(lambda: self.states[0][:1, :PROBE_TOKENS].clone())
        sites = find_sites(module, lambda: self.skeleton.run_block(index, probe))
        return Block(index, module, specs, sites, probe)

    def _original(self, block: Block) -> AbstractContextManager[Original | None]:
        """Return the run of the original model's block as a context, or an empty context if not needed."""
        if self.originals is None:
            return nullcontext()
        with self.timings("original"):
            return closing(Original(self.skeleton, block, self.originals, self.states, self._sample()))

    def _transform(
        self, measuring: Measuring, parts: BlockParts
    ) -> tuple[Transformed | None, Generator[Visit]]:
        """Transform a block; return the changes, None if nothing is transformed, and the visits of its sites.

        A transform by a sample of the tokens comes before all visits, which measure with all tokens.
        """
        transform, block, needs = self.method.transform, measuring.block, measuring.needs
        if transform and transform.sample == 1:  # it sees all tokens, so no site is measured again
            by_expert = ExpertByExpert(measuring, transform, parts)
            return by_expert.transformed, by_expert.visits(self._advance)
        needs = self.method.solves_with or needs  # rtn after a transform: count the tokens of experts
        visits = schedule.visits(replace(measuring, needs=needs), self._advance)
        if not transform or not transform.may_help(block):
            return None, visits
        statistics = measuring.at_once(block.around, transform.sample)
        here = block.specs.keys() - self.skeleton.away(block.index)
        dtypes = {name: block.module.get_submodule(name).weight.dtype for name in sorted(here)}
        with self.timings("transform"):
            transformed = transform.apply(measuring.view(statistics))
            exact = set_aside(block.module, dtypes)
        if measuring.original:
            measuring.original.divide(transformed.divided_by)
        return replace(transformed, statistics={}, exact=exact), visits

    def _stage_changed(self, block: Block, transformed: Transformed | None, parts: BlockParts) -> None:
        """Stage parameters that are not quantized but differ from the source."""
        kept = (spec for spec in block.specs.values() if not spec.grid)
        packed = (f"{spec.local}.weight" for spec in kept if self.job.material.is_packed(spec))
        for name in [*sorted(transformed.changed if transformed else ()), *packed]:
            stored, tensor = self.skeleton.as_stored(block.index, name)
            parts.add({stored: tensor.contiguous()})

    def _advance(self, outputs: Iterable[Tensor]) -> None:
        self.advancing = True
        self.states.advance(self.timings.waiting("forward", outputs))
