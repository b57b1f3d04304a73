"""Peak memory of a quantization job, estimated from shapes; for jobs and for `quantkit plan`.

The loop (loop.py) holds what lies outside the blocks, one block, of its experts two where they stream, and
the hidden states of all calibration tokens; besides them a batch on its way through the block, statistics,
and what solving the largest linear takes. Their sum is above the peak, which never has all of the last three,
and less than twice as much. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from quantkit.models.machine import expert_share
from quantkit.quantize.calibrate import LOGITS_BYTES, LOGITS_TOKENS

MIB = 1 << 20
COMFORT = 0.8  # of the free memory that a job may take where there is another way
FLOAT32 = 4
BATCH_TOKENS = 4096  # of one forward pass: matrix products run at full rate, activations stay small
LOADED_LATER_BYTES = 80 * MIB  # what Python with torch for CPUs and transformers load on the way; measured
KEPT_BYTES = 192 * MIB  # freed pages that a data-free job keeps for its next linears; measured
AT_ONCE = 1 << 26  # values of the temporaries of a range search on an accelerator, see grids/parallel.py
MARGIN = 1.1  # of an accelerator's memory: its allocator rounds up, and holes remain
LOGITS = 5  # copies of the logits at a time: as they are, in float32, their softmax and its sums, gradients
TRACED = 2  # copies of a linear's inputs and outputs that autograd keeps, activations and products among them
SEARCH = 11  # temporaries of a range search, for each weight that it looks at


@dataclass(frozen=True)
class Shapes:
    """The shapes that decide peak memory.

    linears: of one block, `(name inside the block, out_features, in_features)`. rest: parameters outside
    the blocks; largest: of these the stored bytes of the largest tensor. element: bytes per value of a
    forward pass. tokens: of the calibration; batch_tokens: of one forward pass. width: of hidden states,
    where no linear says it: experts may be narrower. experts: names of those linears that are an expert's;
    streamed: they are read when they are called; active: to how many experts a token is routed.
    """

    linears: Sequence[tuple[str, int, int]]
    rest: int
    largest: int
    element: int
    tokens: int
    batch_tokens: int
    width: int | None = None
    experts: frozenset[str] = frozenset()
    streamed: bool = False
    active: int = 1

    @cached_property
    def weights(self) -> int:
        """Weights of one block's linears."""
        return sum(out_features * in_features for _, out_features, in_features in self.linears)

    @cached_property
    def block(self) -> int:
        """Weights of one block that are in memory at a time."""
        routed = [row for row in self.linears if row[0] in self.experts]
        if not self.streamed:
            return self.weights
        kept = expert_share.HELD * expert_share.largest_expert(routed)
        return self.weights - sum(o * i for _, o, i in routed) + kept

    @property
    def hidden(self) -> int:
        return self.width or min(in_features for *_, in_features in self.linears)

    @cached_property
    def widest(self) -> int:
        return max(in_features for *_, in_features in self.linears)

    @cached_property
    def largest_linear(self) -> int:
        return max(out_features * in_features for _, out_features, in_features in self.linears)

    @cached_property
    def widths(self) -> list[int]:
        """Input widths of a block's sites: equally wide linears of one module share one, as do all streamed
        experts of a layer."""
        places = ((name.rpartition(".")[0], width) for name, _, width in self.linears)
        return [w for _, w in {(re.sub(r"\.\d+", "", at) if self.streamed else at, w) for at, w in places}]

    @property
    def moments(self) -> int:
        """Bytes of the second moments of an expert's site; 0 where there are no experts."""
        widths = [in_features for name, _, in_features in self.linears if name in self.experts]
        return FLOAT32 * max(widths, default=0) ** 2

    @property
    def states(self) -> int:
        """Bytes of the hidden states of all tokens."""
        return self.tokens * self.hidden * self.element

    @property
    def moving(self) -> int:
        """Bytes of batches in memory when states wait elsewhere: current, next, and one in transit."""
        return 3 * self.batch_tokens * self.hidden * self.element

    @cached_property
    def spread(self) -> int:
        """Most values of a token: in its widest linear, or in all of its experts."""
        inner = [row[2] for row in self.linears if row[0] in self.experts and row[1] == self.hidden]
        return max(self.widest, self.active * max(inner, default=0))

    @property
    def flight(self) -> int:
        """Bytes of a token of a batch that waits inside the block."""
        return (2 * self.hidden + self.spread) * self.element

    @property
    def waiting(self) -> int:
        """Bytes of batches that wait for one while it runs, so that experts are read once for all of them."""
        batches = min(expert_share.IN_STEP, -(-self.tokens // self.batch_tokens)) - 1 if self.streamed else 0
        return batches * self.batch_tokens * self.flight

    @property
    def batch(self) -> int:
        """Bytes of running a batch: residual, normed and projected states, four tensors of the widest, its
        copy in float32; and of those that wait for it."""
        values = (3 * self.hidden + 4 * self.spread) * self.element
        values += FLOAT32 * self.spread * (self.element < FLOAT32)
        return self.batch_tokens * values + self.waiting


@dataclass(frozen=True)
class Peak:
    """Peak bytes of the device, if not the CPU, and of the host above the interpreter."""

    device: int
    host: int

    @property
    def computing(self) -> int:
        """Bytes where the job computes."""
        return self.device or self.host


def peak_memory(
    shapes: Shapes,
    needs: Collection[str],
    scaled: float = 0.0,
    outside: bool = False,
    suspend: bool = False,
    states: str = "device",
    accelerated: bool = False,
    at_once: int = 1,
) -> Peak:
    """Return the peak bytes of a job.

    needs: statistics of calibration text that the method works from; none for a data-free one. scaled: the
    share of the tokens by whose statistics, of all sites at once, a transform rewrites the block; of less
    than all tokens it has others than the solver, and keeps weights in float32 next to those that the
    block computes with. outside: embedding and head are encoded before the first block. suspend: every batch
    waits at a site until the site is solved. states: where the hidden states are kept, on the `device` that
    computes, the `host` or the `disk`. at_once: statistics of so many sites of experts are gathered by one
    repeated forward.
    """
    element, away, largest = shapes.element, states != "device", shapes.largest_linear
    copied = FLOAT32 * (element < FLOAT32)  # bytes of a weight in float32 next to the block's own
    # a linear in float32 with its candidates and codes; a CPU searches ranges a cacheful at a time
    solving = 18 * largest
    if accelerated:
        solving = max(solving, FLOAT32 * (min(SEARCH * largest, AT_ONCE) + 3 * largest))
    block, elsewhere = shapes.block * element, 0  # elsewhere: what waits on the host for an accelerator
    if not needs:
        kept = 0 if accelerated else min(KEPT_BYTES, FLOAT32 * shapes.weights)
        job = block * (2 if copied else 1) + solving + kept + shapes.waiting
    else:
        whole = scaled == 1
        suspend = suspend and not whole  # those batches hold the states they began with, wherever these are
        running = shapes.states * (suspend or not away) + shapes.moving * away + shapes.batch
        running += shapes.tokens * shapes.flight * suspend
        together = FLOAT32 * sum(width**2 for width in shapes.widths) if scaled else 0
        moments = max(FLOAT32 * shapes.widest**2 * ("hessian" in needs), together)
        moments += (at_once + 1) * shapes.moments
        if "hessian" in needs and (accelerated or "drift" in needs or not whole):
            # of the second moments; errors and codes of two linears
            factors = max(4 * shapes.widest**2, 2 * shapes.widest**2 + 9 * largest)
            solving = max(solving, FLOAT32 * factors + 2 * largest * copied)
        if scaled and shapes.streamed:  # what enters each layer of experts, until all of them have come
            experts = map(expert_share.expert_of, shapes.experts)
            elsewhere = shapes.states * len({name.rpartition(".")[0] for name in experts})
        if "drift" in needs:  # inputs and outputs of the original's sites, and their moments with those here
            elsewhere += (4 * shapes.hidden + sum(shapes.widths)) * shapes.tokens * element
            moments *= 5
        if "curvature" in needs:
            solving += _curvatures(shapes)
        if whole:
            block, solving = shapes.block * FLOAT32, max(solving, together)
        elif scaled:
            block += shapes.block * copied
        if outside:  # codes wait while the head is measured, and are made of what is read once more
            block, moments = max(block, shapes.largest), moments + shapes.largest // 2
        job = block + running + moments + solving
    if not (accelerated and away):
        job, elsewhere = job + elsewhere, 0
    working = shapes.rest * element + max(job, shapes.largest)
    if not accelerated:
        return Peak(0, LOADED_LATER_BYTES + working)
    if needs and states == "host":
        elsewhere += 2 * shapes.states  # the allocator of pinned memory hands out powers of two
    reading = max(shapes.largest, shapes.block * element) + 3 * largest
    return Peak(int(MARGIN * working), LOADED_LATER_BYTES + reading + elsewhere)


def _curvatures(shapes: Shapes) -> int:
    """Return bytes of the output curvatures of a block's linears, of the largest factorization, and of
    autograd's copies of a batch (`curvature.py`) or of the logits of some tokens."""
    outs = [out for _, out, _ in shapes.linears]
    routed = sum(out + width for name, out, width in shapes.linears if name in shapes.experts)
    experts = len({expert_share.expert_of(name) for name in shapes.experts}) or 1
    values = sum(out + width for _, out, width in shapes.linears) - routed + shapes.active * routed // experts
    kept = shapes.batch_tokens * (TRACED * values * shapes.element + 8 * shapes.hidden * FLOAT32)
    vocabulary = shapes.rest // shapes.hidden  # at most
    logits = LOGITS * min(LOGITS_BYTES, FLOAT32 * LOGITS_TOKENS * vocabulary)
    return FLOAT32 * (sum(out**2 for out in outs) + 5 * max(outs) ** 2) + max(kept, logits)


def forward_memory(shapes: Shapes, spilled: bool = False) -> int:
    """Return peak bytes of running the blocks, the next one read ahead; spilled: the states are in a file."""
    states = shapes.moving if spilled else shapes.states
    return (shapes.rest + 2 * shapes.block) * shapes.element + states + shapes.batch


def scratch_bytes(depth: int, shapes: Shapes) -> int:
    """Return bytes of the temporary files of a job with gradients: in the forward pass the inputs of each
    block, replaced by its curvatures in the backward pass."""
    return depth * max(shapes.states, sum(2 * out**2 for _, out, _ in shapes.linears))


def sites_at_once(shapes: Shapes, free: int, need: int) -> int:
    """Return how many sites of a layer's experts can be measured at once by a job that needs `need` bytes
    with one."""
    spare = max(0, int(COMFORT * free) - need)
    return 1 + min(len(shapes.experts), spare // shapes.moments) if shapes.moments else 1
