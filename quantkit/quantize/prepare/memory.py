"""What a quantization job takes in memory: a formula over shapes. The plan asks here, and `quantkit plan`.

The loop (loop.py) holds what lies outside the blocks, one block, of its experts two where they are streamed,
and the hidden states of all calibration tokens. Its peak is in one of three places: where a batch runs
through the block, where the largest site is solved, or where the result is read back and run with the first
batch. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from quantkit.models.machine import held

MIB = 1 << 20
PART_BYTES = MIB  # of a block's codes that wait in memory before they are staged
COMFORT = 0.8  # of the free memory that a job may take where there is another way
FLOAT32 = 4
BATCH_TOKENS = 4096  # of one forward pass: matrix products run at full rate, activations stay small
# What Python with torch for CPUs and transformers load on the way, with and without calibration; measured.
LOADED_LATER_BYTES = {False: 64 * MIB, True: 80 * MIB}
KEPT_BYTES = 192 * MIB  # freed pages that a data-free job keeps for its next linears; measured
AT_ONCE = 1 << 26  # values of the temporaries of a range search on an accelerator, see grids/parallel.py
MARGIN = 1.1  # of an accelerator's memory: its allocator rounds up, and holes remain
LOGITS_BYTES, LOGITS_TOKENS = 1 << 26, 1024  # float32 logits that gradients are made of at a time
LOGITS = 5  # of them at a time: as they are, in float32, their softmax and its sums, gradients
TRACED = 2  # copies of a linear's inputs and outputs that autograd keeps, activations and products among them
SEARCHED = 4096  # rows that a transform looks at where several sites share a scale
SEARCH = 11  # temporaries of a range search, for each weight that it looks at


@dataclass(frozen=True)
class Shapes:
    """What peak memory depends on.

    linears: of one block, `(name inside the block, out_features, in_features)`. rest: parameters outside
    the blocks; largest: of these the stored bytes of the largest tensor, converted: of the largest that is
    of another type than a forward pass. element: bytes per value of such a pass. tokens: of the
    calibration; batch_tokens: of one forward pass. width: of hidden states, where no linear says it:
    experts may be narrower. experts: names of those linears that are an expert's; streamed: they are read
    when they are called; active: to how many experts a token is routed. vocabulary: of the model, where
    gradients are wanted.
    """

    linears: Sequence[tuple[str, int, int]]
    rest: int
    largest: int
    converted: int
    element: int
    tokens: int
    batch_tokens: int
    width: int | None = None
    experts: frozenset[str] = frozenset()
    streamed: bool = False
    active: int = 1
    vocabulary: int = 0

    @property
    def beside(self) -> int:
        """Values of a token that are kept of the original block: what leaves it, the inputs of its sites, and
        what its first writer says, there and here."""
        return 3 * self.hidden + sum(width for (_, width) in self.sites_around)

    @cached_property
    def block(self) -> int:
        """Weights of one block that are in memory at a time."""
        routed = [row for row in self.linears if row[0] in self.experts]
        if not self.streamed:
            return self.weights
        return self.weights - _weights(routed) + held.HELD * held.largest_expert(routed)

    @cached_property
    def weights(self) -> int:
        """Weights of one block's linears."""
        return _weights(self.linears)

    @property
    def spread(self) -> int:
        """Values of a token where it takes most: in its widest linear, or in all of its experts."""
        inner = [row[2] for row in self.linears if row[0] in self.experts and row[1] == self.hidden]
        return max(self.widest, self.active * max(inner, default=0))

    @property
    def flight(self) -> int:
        """Values of a token of a batch that waits."""
        return 2 * self.hidden + self.spread

    @property
    def waiting(self) -> int:
        """Bytes of batches that wait for one while it runs, so that experts are read once for all of them."""
        batches = min(held.IN_STEP, -(-self.tokens // self.batch_tokens)) - 1 if self.streamed else 0
        return batches * self.batch_tokens * self.flight * self.element

    @property
    def staging(self) -> int:
        """Bytes of codes, at 4 bit, that wait for the disk, are on their way there, and are copied for it."""
        return min(self.weights // 2, 3 * (PART_BYTES + self.largest_linear // 2))

    @property
    def moments(self) -> int:
        """Bytes of the second moments of an expert's site; 0 where there are no experts."""
        widths = [in_features for name, _, in_features in self.linears if name in self.experts]
        return FLOAT32 * max(widths, default=0) ** 2

    @property
    def around(self) -> list[int]:
        """Widths of the sites whose statistics a transform has at once: all, or where experts are streamed
        those around them, of what enters their layer and their down projections, and of one expert."""
        if not (self.streamed and self.experts):
            return [width for _, width in self.sites]
        widths = [width for name, _, width in self.linears if name in self.experts]
        return [width for _, width in self.sites_around] + 2 * [min(widths), max(widths)]

    @property
    def sites_around(self) -> list[tuple[str, int]]:
        """Keys of the sites that are no expert's."""
        inside = {(name.rpartition(".")[0], width) for name, _, width in self.linears if name in self.experts}
        return [key for key in self.sites if key not in inside]

    @property
    def entering(self) -> int:
        """Bytes of what enters layers of experts, kept for a transform until each expert has come."""
        layers = {held.expert_of(name).rpartition(".")[0]: name for name in self.experts}
        matrices = sum(held.expert_of(name) == name for name in layers.values())  # these see a token's copies
        values = len(layers) + matrices * (self.active - 1)
        return values * self.tokens * self.hidden * self.element if self.streamed else 0

    @property
    def sampled(self) -> int:
        """Bytes of the rows of experts that are looked at together."""
        rows = min(SEARCHED, sum(row[1] for row in self.linears if row[0] in self.experts))
        return FLOAT32 * rows * self.hidden

    @property
    def hidden(self) -> int:
        return self.width or min(in_features for *_, in_features in self.linears)

    @property
    def widest(self) -> int:
        return max(in_features for *_, in_features in self.linears)

    @property
    def largest_linear(self) -> int:
        return max(out_features * in_features for _, out_features, in_features in self.linears)

    @property
    def sites(self) -> dict[tuple[str, int], int]:
        """Weights of linears that may share an input: those of one module and width. Key: (module, width)."""
        found: dict[tuple[str, int], int] = {}
        for name, out_features, in_features in self.linears:
            key = name.rpartition(".")[0], in_features
            found[key] = found.get(key, 0) + out_features * in_features
        return found


def _weights(linears: Sequence[tuple[str, int, int]]) -> int:
    return sum(out_features * in_features for _, out_features, in_features in linears)


@dataclass(frozen=True)
class Peak:
    """Most bytes held at a time: by the device, where that is not the CPU, and by the host, above what the
    interpreter takes."""

    device: int
    host: int

    @property
    def computing(self) -> int:
        """Bytes where the job computes."""
        return self.device or self.host


def peak_memory(
    shapes: Shapes,
    calibrated: bool,
    hessian: bool,
    transform: bool,
    suspend: bool,
    tables: int = 0,
    states: str | None = None,
    at_once: int = 1,
    drift: bool = False,
    gradients: bool = False,
    sampled: bool = False,
    spilled: bool = False,
    outside: bool = False,
) -> Peak:
    """Peak bytes of a job.

    calibrated: statistics are gathered at all; hessian: second moments are among them; transform: they are
    of `around` at once; suspend: every batch is held at a site until that is solved. tables:
    bytes to make look-up tables. states: None where the CPU computes; on an accelerator the `device` or the
    `host`, where the hidden states are kept. at_once: statistics of so many sites of experts are gathered by
    one repeated forward. drift: the original model runs beside. gradients: the outputs' curvatures are
    gathered first, and solved with. sampled: a transform had those of `around` before, of some tokens, and
    has left weights in float32 beside those that the block computes with. spilled: the hidden states lie in
    a file. outside: embedding and head are encoded before the first block.
    """
    element, hidden = shapes.element, shapes.hidden
    later, rest, block = LOADED_LATER_BYTES[calibrated], shapes.rest * element, shapes.block * element
    narrow = element < FLOAT32
    held = shapes.tokens * hidden * element if calibrated else 0
    search = _search(shapes.largest_linear) if states else 0  # a CPU takes a cacheful at a time
    tables = 0 if states else tables
    away = spilled or states == "host"
    moving = 3 * shapes.batch_tokens * hidden * element if away else 0  # there, next and back
    entering = originals = 0
    if not calibrated:
        copies = max(FLOAT32 * 4 * shapes.largest_linear, search) + (block if narrow else 0)
        kept = 0 if states else min(KEPT_BYTES, FLOAT32 * shapes.weights)
        working = rest + max(shapes.converted, block + copies + kept, tables)
        working += shapes.waiting
    else:
        # suspended batches hold the states they began with, wherever those are kept
        here = moving if away and not (suspend and not transform) else held + moving
        running, solving = _steps(shapes, hessian, transform, suspend, search, drift)
        if sampled:
            aside = shapes.block * FLOAT32 if narrow else 0
            looking = _steps(shapes, hessian, True, False, search, False)
            running, solving = (max(a + aside, b) for a, b in zip((running, solving), looking, strict=True))
        verifying = block + _batch(shapes) + shapes.waiting + FLOAT32 * 4 * shapes.largest_linear
        verifying = max(shapes.converted, verifying)
        # of an expert's layer, and of other experts that wait to be solved
        beside = at_once * shapes.moments if hessian and not transform else 0
        entering = shapes.entering if transform else 0
        originals = shapes.tokens * (hidden * (not spilled) + shapes.beside) * element if drift else 0
        here += 0 if states == "host" else entering + originals
        if gradients:
            solving += _second_side(shapes)
        working = rest + max(here + running + beside, here + solving + beside, verifying, tables)
        if outside:  # codes wait while the head is measured, and are made of what is read once more
            working = max(working, rest + max(here + running, shapes.largest + solving) + shapes.largest // 2)
        if gradients:
            working = max(working, rest + (moving if away else held) + _backward(shapes))
    if states is None:
        return Peak(0, int(later + working))
    reading = max(shapes.largest, block) + 2 * shapes.staging
    # the allocator of pinned memory hands out powers of two
    kept = (0 if spilled else 2 * held) + entering + originals if states == "host" else 0
    return Peak(int(MARGIN * working), int(later + reading + kept))


def _batch(shapes: Shapes) -> int:
    """What running one batch takes: residual, normed and projected states, four tensors of the widest, its
    copy in float32."""
    element, hidden, spread = shapes.element, shapes.hidden, shapes.spread
    narrow = element < FLOAT32
    return shapes.batch_tokens * ((3 * hidden + 4 * spread) * element + narrow * spread * FLOAT32)


def _search(weights: int) -> int:
    """Bytes of a range search and of what it finds, where as many weights as fit AT_ONCE are looked at."""
    return FLOAT32 * (min(SEARCH * weights, AT_ONCE) + 3 * weights)


def _steps(
    shapes: Shapes, hessian: bool, transform: bool, suspend: bool, search: int, drift: bool
) -> tuple[int, int]:
    """What running a block and solving its largest site take, besides the states of all tokens."""
    element, flight = shapes.element, shapes.flight * shapes.element
    narrow, suspend = element < FLOAT32, suspend and not transform
    live = shapes.tokens * flight if suspend else 0
    moments = [FLOAT32 * width**2 for _, width in shapes.sites] if hessian else [0]
    block = shapes.block * (FLOAT32 if transform else element)
    running = block + _batch(shapes) + (live - shapes.batch_tokens * flight if live else shapes.waiting)
    together = sum(FLOAT32 * width**2 for width in shapes.around)
    if drift:  # two halves of a second such matrix, and of that of what the writer's output lacks
        short = [FLOAT32 * 2 * (width**2 + shapes.hidden * width) for _, width in shapes.sites_around] or [0]
        running += FLOAT32 * 2 * shapes.batch_tokens * shapes.widest
        running += sum(short) if transform else max(short)
    running += together if transform else max(moments)
    solving = max(FLOAT32 * 4 * shapes.largest_linear, search)
    if hessian:
        solving = max(
            max(
                5 * FLOAT32 * width**2, FLOAT32 * (3 * width**2 + 4.25 * weights), FLOAT32 * width**2 + search
            )
            + narrow * FLOAT32 * weights
            for (_, width), weights in shapes.sites.items()
        )
    if drift:  # the moves of a linear, and all weights of the site as they are moved
        solving += max(short) + FLOAT32 * (4 * shapes.largest_linear + max(shapes.sites.values()))
    if transform:  # these moments are there until their sites are solved
        # those of scaled sites beside what they were, or the weights that a scale is folded into
        searching = max(together, FLOAT32 * 2 * shapes.largest_linear, search, shapes.sampled)
        solving = together + max(searching, solving - max(moments) if search or drift else 0)
        solving += sum(short) if drift else 0
    return running, solving + block + live + shapes.staging


def _backward(shapes: Shapes) -> int:
    """What the way back through a block takes, besides what lies outside the blocks and the gradients of all
    tokens (`curvature.py`): the block whole, a batch with all that autograd keeps of it, or the logits of
    some tokens; and the curvatures of its linears' outputs."""
    element, batch, outs = shapes.element, shapes.batch_tokens, [out for _, out, _ in shapes.linears]
    experts = sum(sum(row[1:]) for row in shapes.linears if row[0] in shapes.experts)
    number = len({held.expert_of(row[0]) for row in shapes.linears if row[0] in shapes.experts}) or 1
    values = sum(sum(row[1:]) for row in shapes.linears) - experts + shapes.active * experts // number
    kept = batch * (TRACED * values * element + 8 * shapes.hidden * FLOAT32)
    logits = LOGITS * min(LOGITS_BYTES, FLOAT32 * LOGITS_TOKENS * shapes.vocabulary)
    sums = sum(FLOAT32 * out**2 for out in outs) + 3 * FLOAT32 * max(outs) ** 2
    return max(shapes.weights * element + kept + sums, logits)


def _second_side(shapes: Shapes) -> int:
    """What solving by both sides takes beside solving by one: curvatures of a block as they lie in their
    file, and of the largest as it is factored; of the largest linear codes and errors once more."""
    outs = [out for _, out, _ in shapes.linears]
    return (
        sum(2 * out**2 for out in outs) + 5 * FLOAT32 * max(outs) ** 2 + 3 * FLOAT32 * shapes.largest_linear
    )


def scratch_bytes(depth: int, shapes: Shapes) -> int:
    """Bytes of the files that a job with gradients needs for a while: on the way forward what enters each
    block, on the way back their curvatures in place of that."""
    entering = shapes.tokens * shapes.hidden * shapes.element
    return depth * max(entering, sum(2 * out**2 for _, out, _ in shapes.linears))


def sites_at_once(shapes: Shapes, free: int, need: int) -> int:
    """Of how many sites of a layer's experts the statistics fit beside a job that takes `need` bytes with
    those of one."""
    if not shapes.moments:
        return 1
    spare = int(COMFORT * free) - need
    return 1 + min(len(shapes.experts), max(0, spare // shapes.moments))
