"""Peak memory of a quantization job, estimated from shapes, for jobs and for `quantkit plan`.

The loop (loop.py) keeps in memory: everything outside the blocks, one block (of streamed experts only two),
and the hidden states of all calibration tokens. Added to these are a batch inside the block, statistics, and
the solver's work on the largest linear. The last three never reach their peaks together, so their sum is an
upper limit, less than twice the true peak. torch is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from quantkit.layouts import Statistic
from quantkit.models.machine import expert_share
from quantkit.quantize.calibrate import LOGITS_BYTES, LOGITS_TOKENS, LOSS_BYTES, original_every

MIB = 1 << 20
COMFORT = 0.8  # of the free memory that a job may take where there is another way
FLOAT32 = 4
BATCH_TOKENS = 4096  # of one forward pass: matrix products run at full rate, activations stay small
LOADED_LATER_BYTES = 80 * MIB  # what Python with torch for CPUs and transformers load on the way; measured
PREDICTED_BYTES = 1 << 28  # log-probabilities of the original model, to measure the loss of an output by
LOSS_TOKENS = {True: 512, False: 256}  # default of --loss-tokens, with and without calibration
KEPT_BYTES = 192 * MIB  # freed pages that a data-free job keeps for its next linears; measured
SEARCH_VALUES = 1 << 26  # of a range search's temporaries on an accelerator, see grids/parallel.py
MARGIN = 1.1  # of an accelerator's memory: its allocator rounds up, and holes remain
LOGITS = 5  # copies of the logits at a time: as they are, in float32, their softmax and its sums, gradients
TRACED = 2  # copies of a linear's inputs and outputs that autograd keeps, activations and products among them
REPLAYED = 2 * 128 * 24  # of two groups of a row: what stays of each shape, see solvers/replay.py
SEARCH = 11  # temporaries of a range search, for each weight that it looks at


@dataclass(frozen=True)
class Shapes:
    """The shapes that decide peak memory.

    linears: of one block, `(name in the block, out_features, in_features)`. rest: parameters outside the
    blocks; largest: stored bytes of the largest of these. element: bytes per value in a forward pass. tokens:
    of the calibration text; batch_tokens: per forward pass. width: of hidden states; None: the smallest
    in_features. experts: names of the linears that are an expert's. streamed: experts are read when called.
    active: experts per token. predicted: bytes of log-probabilities by which the loss of the output is
    measured.
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
    predicted: int = 0

    @cached_property
    def weights(self) -> int:
        """Number of weights in one block's linears."""
        return sum(out_features * in_features for _, out_features, in_features in self.linears)

    @cached_property
    def block(self) -> int:
        """Number of one block's weights that are in memory at a time."""
        routed = [row for row in self.linears if row[0] in self.experts]
        if not self.streamed:
            return self.weights
        kept = expert_share.IN_MEMORY * expert_share.largest_expert(routed)
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
        """Input width of each site: equally wide linears of one module count as one site, and so do all
        streamed experts of a layer."""
        places = ((name.rpartition(".")[0], width) for name, _, width in self.linears)
        return [w for _, w in {(re.sub(r"\.\d+", "", at) if self.streamed else at, w) for at, w in places}]

    @property
    def moments(self) -> int:
        """Bytes of the second moments of an expert's site; 0 without experts."""
        widths = [in_features for name, _, in_features in self.linears if name in self.experts]
        return FLOAT32 * max(widths, default=0) ** 2

    def each(self, accelerated: bool) -> int:
        """Bytes of one more site of experts at a time: its second moments; on an accelerator, which solves it
        together with the others, also copies of these, and of two linears with errors and codes."""
        largest = max((out * width for name, out, width in self.linears if name in self.experts), default=0)
        return 4 * self.moments + 26 * FLOAT32 * largest if accelerated else self.moments

    @property
    def states(self) -> int:
        """Bytes of the hidden states of all tokens."""
        return self.tokens * self.hidden * self.element

    @property
    def moving(self) -> int:
        """Bytes in memory if hidden states are on host or disk: current, next and copied batch."""
        return 3 * self.batch_tokens * self.hidden * self.element

    @cached_property
    def spread(self) -> int:
        """Largest number of values per token: in the widest linear, or in all of the token's experts."""
        inner = [row[2] for row in self.linears if row[0] in self.experts and row[1] == self.hidden]
        return max(self.widest, self.active * max(inner, default=0))

    @property
    def flight(self) -> int:
        """Bytes per token of a batch that waits inside the block."""
        return (2 * self.hidden + self.spread) * self.element

    @property
    def waiting(self) -> int:
        """Bytes of batches that wait while another runs, so that experts are read once for all."""
        batches = min(expert_share.IN_STEP, -(-self.tokens // self.batch_tokens)) - 1 if self.streamed else 0
        return batches * self.batch_tokens * self.flight

    @property
    def batch(self) -> int:
        """Bytes of running a batch: residual, normed and projected states, four tensors as wide as the
        widest, one of them in float32, and batches that wait."""
        values = (3 * self.hidden + 4 * self.spread) * self.element
        values += FLOAT32 * self.spread * (self.element < FLOAT32)
        return self.batch_tokens * values + self.waiting


@dataclass(frozen=True)
class Peak:
    """Peak bytes. device: of an accelerator, 0 for the CPU. host: in addition to the interpreter."""

    device: int
    host: int

    @property
    def computing(self) -> int:
        """Peak bytes on the device that computes."""
        return self.device or self.host


def peak_memory(
    shapes: Shapes,
    needs: Collection[Statistic],
    scaled: float = 0.0,
    outside: bool = False,
    suspend: bool = False,
    states: str = "device",
    accelerated: bool = False,
    at_once: int = 1,
) -> Peak:
    """Return the peak bytes of a job.

    needs: statistics of calibration text; empty if data-free. scaled: share of the tokens whose statistics a
    transform uses, for all sites at once; 0 without a transform; below 1 the solver needs its own statistics,
    and float32 weights are kept next to the block's. outside: embedding and head are encoded before the first
    block. suspend: every batch waits at a site until the site is solved. states: where hidden states are
    kept: `device`, `host` or `disk`. at_once: how many sites of experts one repeated forward pass measures.
    """
    element, away, largest = shapes.element, states != "device", shapes.largest_linear
    copied = FLOAT32 * (element < FLOAT32)  # bytes of a weight in float32 next to the block's own
    # a linear in float32 with its candidates and codes; a CPU searches ranges a cacheful at a time
    solving = 18 * largest
    if accelerated:
        solving = max(solving, FLOAT32 * (min(SEARCH * largest, SEARCH_VALUES) + 3 * largest))
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
        square = FLOAT32 * shapes.widest**2
        moments = max(square * (Statistic.HESSIAN in needs), together)
        moments += (at_once - 1) * shapes.each(accelerated) + 2 * shapes.moments
        if Statistic.HESSIAN in needs and (accelerated or Statistic.DRIFT in needs or not whole):
            # the factor of H, or a permuted copy, and for yaqa both; errors and codes of two linears
            factors = square * (1 + (Statistic.CURVATURE in needs)) + 9 * FLOAT32 * largest
            # before: H of the compared tokens, its factor and a quarter more, drifts, weights
            aiming = square * 9 // 4 + FLOAT32 * (2 * max(largest, shapes.hidden**2) + largest)
            solving = max(solving, factors + 2 * largest * copied, aiming * (Statistic.DRIFT in needs))
        if Statistic.HESSIAN in needs and accelerated:
            solving += REPLAYED * sum(out for name, out, _ in shapes.linears if name not in shapes.experts)
        if scaled and shapes.streamed:  # what enters each layer of experts, until all of them have come
            experts = map(expert_share.expert_of, shapes.experts)
            elsewhere = shapes.states * len({name.rpartition(".")[0] for name in experts})
        if Statistic.DRIFT in needs:  # inputs and outputs of the original's sites
            batches = -(-shapes.tokens // shapes.batch_tokens)
            sampled = -(-batches // original_every(shapes.tokens, shapes.widest)) * shapes.batch_tokens
            elsewhere += (4 * shapes.hidden + sum(shapes.widths)) * sampled * element
        if Statistic.CURVATURE in needs:
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
    working = shapes.rest * element + max(job, shapes.largest, loss_memory(shapes, accelerated))
    if not accelerated:
        return Peak(0, LOADED_LATER_BYTES + working)
    if needs and states == "host":
        elsewhere += 2 * shapes.states  # the allocator of pinned memory hands out powers of two
    reading = max(shapes.largest, shapes.block * element) + 3 * largest
    waiting = max(reading + elsewhere, shapes.predicted)
    return Peak(int(MARGIN * working), LOADED_LATER_BYTES + waiting)


def _curvatures(shapes: Shapes) -> int:
    """Return the bytes of output curvatures of a block's linears, of the largest factorization, and of
    autograd's copies of a batch (`curvature.py`) or the logits of some tokens."""
    outs = [out for _, out, _ in shapes.linears]
    routed = sum(out + width for name, out, width in shapes.linears if name in shapes.experts)
    experts = len({expert_share.expert_of(name) for name in shapes.experts}) or 1
    values = sum(out + width for _, out, width in shapes.linears) - routed + shapes.active * routed // experts
    kept = shapes.batch_tokens * (TRACED * values * shapes.element + 8 * shapes.hidden * FLOAT32)
    vocabulary = shapes.rest // shapes.hidden  # at most
    logits = LOGITS * min(LOGITS_BYTES, FLOAT32 * LOGITS_TOKENS * vocabulary)
    return FLOAT32 * (sum(out**2 for out in outs) + 5 * max(outs) ** 2) + max(kept, logits)


def forward_memory(shapes: Shapes, spilled: bool = False) -> int:
    """Return the peak bytes of running the blocks while the next is read. spilled: states are in a file."""
    states = shapes.moving if spilled else shapes.states
    return (shapes.rest + 2 * shapes.block) * shapes.element + states + shapes.batch


def loss_tokens(wanted: int | None, calibrates: bool, vocabulary: int) -> int:
    """Return the number of tokens on which the loss of an output is measured: `wanted`, or the default for
    None, at most as many as PREDICTED_BYTES allow."""
    return min(LOSS_TOKENS[calibrates] if wanted is None else wanted, PREDICTED_BYTES // (4 * vocabulary))


def loss_memory(shapes: Shapes, away: bool = False) -> int:
    """Return the peak bytes of measuring the loss of an output, besides all outside the blocks: a block, of
    which one linear is rounded to nearest, and predictions. away: these are on the host."""
    if not shapes.predicted:
        return 0
    block = shapes.block * shapes.element + 18 * shapes.largest_linear
    return block + (0 if away else shapes.predicted) + LOGITS * min(LOSS_BYTES, shapes.predicted)


def scratch_bytes(depth: int, shapes: Shapes) -> int:
    """Return the bytes of temporary files of a job with gradients: the inputs of each block, which the
    backward pass replaces by the block's curvatures."""
    return depth * max(shapes.states, sum(2 * out**2 for _, out, _ in shapes.linears))


def sites_at_once(shapes: Shapes, free: int, need: Peak) -> int:
    """Return how many sites, of a layer and its experts, fit in memory at once. need: of a job that measures
    one site at a time."""
    experts = len(set(map(expert_share.expert_of, shapes.experts)))
    spare = max(0, int(COMFORT * free) - need.computing)
    return 1 + min(experts, spare // shapes.each(need.device > 0)) if experts else 1
