"""The statistics of a block's sites, from running the hidden states through it."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from torch import Tensor

from quantkit.layouts import Statistic
from quantkit.models.machine import distributed
from quantkit.models.machine.memory import MAPPED_BYTES, return_freed_pages
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import capture
from quantkit.quantize.calibrate.capture import SiteSums
from quantkit.quantize.calibrate.curvature import Curvatures
from quantkit.quantize.calibrate.original import Original
from quantkit.quantize.calibrate.sites import Block, Site
from quantkit.quantize.calibrate.states import States
from quantkit.quantize.calibrate.statistics import Choice, SiteStatistics
from quantkit.quantize.calibrate.view import BlockView
from quantkit.quantize.timings import Timings


@dataclass(frozen=True)
class Execution:
    """How a job runs. All fields but the last two affect the output's bytes and are in the fingerprint.

    batch_size: sequences per forward pass. states: `device`, `host` or `disk`, where the hidden states are
    kept. at_once: how many sites of experts one repeated pass measures, and an accelerator solves together.
    """

    dtype: str
    device: str
    batch_size: int
    sequential: str
    threads: int
    states: str = "device"
    at_once: int = 1

    def decisive(self) -> dict:
        """Return the fields that affect the output's bytes."""
        return {name: value for name, value in asdict(self).items() if name not in ("states", "at_once")}


@dataclass(frozen=True)
class Measuring:
    """Measures a block by running `states` through it. needs: the statistics. choice: which tokens an
    expert's statistics use. batches: number on all ranks; `states` has this rank's. original: the original
    model's block, if needed. curvatures: for the weights of tokens, if measured."""

    skeleton: Skeleton
    block: Block
    states: States
    execution: Execution
    needs: frozenset[Statistic]
    choice: Choice
    timings: Timings
    batches: int
    original: Original | None = None
    curvatures: Curvatures | None = None

    def run(self, most: int | None = None) -> Callable[[int], Tensor]:
        """Return a function that runs the block on batch k. most: only its first sequences."""
        if self.original:
            return partial(self.original.run, most=most)
        return lambda k: self.skeleton.run_block(self.block.index, self.states[k][:most])

    def in_step(self, run: Callable[[int], Tensor], count: int) -> Iterator[Tensor]:
        """Yield `run(k)` of `count` batches; they wait for each other where an expert is read."""
        return self.skeleton.in_step(self.block.index, run, count)

    def outputs(self) -> Iterator[Tensor]:
        """Yield the block's outputs with its present weights, batch by batch."""
        return self.in_step(self.run(), len(self.states))

    def view(self, statistics: Mapping[Site, SiteStatistics]) -> BlockView:
        """Return the view of the block that a transform works on."""
        block, index, skeleton = self.block, self.block.index, self.skeleton
        return BlockView(
            block=block.module,
            sites=[site for site in block.sites if site.linears],
            statistics=statistics,
            grids={name: spec.grid for name, spec in block.specs.items()},
            probe=lambda: skeleton.run_block(index, block.probe.float()),
            stored=lambda name, tensor: tensor.to(skeleton.stored_dtype(index, name)),
            away=skeleton.away(index),
            read=partial(skeleton.part, index),
        )

    def at_once(self, sites: Sequence[Site], sample: float = 1.0) -> dict[Site, SiteStatistics]:
        """Return the statistics of all these sites with the present weights, from one forward pass. sample:
        share of the sequences, evenly spaced."""
        span, sequences = distributed.span(self.batches), len(self.states[0])
        sampled = range(0, self.batches, round(1 / sample))
        # sequences of a batch: fewer than all where batches are few
        most = math.ceil(sample * sequences * self.batches / len(sampled))
        batches = [k - span.start for k in sampled if k in span]
        run, whole = self.run(most), sample == 1
        gathered = {site: self.sums(site, whole) for site in sites}
        outputs = self.in_step(lambda position: run(batches[position]), len(batches))
        with self.timings("forward"):
            capture.gather(
                self.block.module, gathered, lambda: deque(outputs, maxlen=0),
                self.original.counterpart if whole and self.original else lambda site: None,
            )  # fmt: skip
        measured = {site: self.finished(site, sums) for site, sums in gathered.items()}
        layers: dict[str, SiteStatistics] = {}
        return {site: self.mixed(layers, site, statistics) for site, statistics in measured.items()}

    def mixed(
        self, layers: dict[str, SiteStatistics], site: Site, statistics: SiteStatistics
    ) -> SiteStatistics:
        """Return the statistics that a site is solved with. An expert's are mixed with those of its whole
        layer; the layer's are measured first and kept in `layers`."""
        if site.linears:
            return statistics.mixed(layers[site.pool], self.choice) if site.pool else statistics
        layers.clear()
        layers[site.pool] = statistics
        return statistics

    def summed(self, site: Site, inputs: Iterable[Tensor]) -> SiteStatistics:
        """Return a site's statistics from all batches of its inputs."""
        sums = self.sums(site)
        for k, batch in enumerate(self.timings.waiting("forward", inputs)):
            with self.timings("hessian", wait=False):
                sums.add(batch, self.original.counterpart(site, k) if self.original else None)
        return self.finished(site, sums)

    def sums(self, site: Site, whole: bool = True) -> SiteSums:
        """Return empty sums for a site. With curvatures, tokens count by their gradients in H, but not those
        of experts. whole: all tokens will be added, in their order."""
        weights, names = None, [spec.local for spec in self.block.quantized(site)]
        if self.curvatures and whole and names and not site.pool and site.calls == 1:
            weights = self.curvatures.weights(self.block.index, names)
        return SiteSums(site.in_features, self.skeleton.device, self.needs, weights)

    def finished(self, site: Site, sums: SiteSums) -> SiteStatistics:
        """Return a site's statistics from `sums`. Raises QuantkitError if activations are not finite."""
        with self.timings("hessian"):
            statistics = sums.finish()
            if 4 * site.in_features**2 >= MAPPED_BYTES:  # else the solver's copies fill the holes of the heap
                return_freed_pages()
        statistics.refuse_not_finite(self.block.reader(site).name, self.execution.dtype)
        return statistics
