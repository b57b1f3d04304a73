"""Sensitivity: how far one unit moves the predictions of the model, in bounded memory.

Hidden states of a few tokens run block by block through the original model and the usual model, in which all
units have their usual candidates. At each block, each unit is replaced by its measured candidate in turn.
Each result starts a stream of hidden states, which runs through the later blocks of the usual model. At the
output the stream's divergence from the usual model is measured, because it is a sum of squares: to second
order it depends on the replaced unit alone (docs/auto.md).

One block and a limited number of streams are in memory. For further streams, the model is walked again, from
the block at which the limit was reached.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.auto.solving import Solving, States, Values
from quantkit.auto.units import Unit
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import divergence, walk

Divergence = dict[str, float]  # mean over tokens and standard error, in nats


@dataclass
class _Stream:
    """The usual model's hidden states with one unit replaced. unit: its name. head: the unit's weight, by its
    name in the model, if logits are computed with it."""

    unit: str
    states: States
    head: Values = field(default_factory=dict)


def steps(units: Sequence[Unit], depth: int) -> int:
    """Return the number of blocks that the streams of all units run through. depth: blocks of the model."""
    return sum(depth - (unit.block or 0) for unit in units)


@torch.no_grad()
def measure(
    skeleton: Skeleton,
    units: Sequence[Unit],
    tokens: Sequence[Tensor],
    calibration: Sequence[Tensor],
    replacer: Solving,
    limit: int,
    report: Callable[[], None] = lambda: None,
    compared: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[tuple[Divergence, dict[str, Divergence]]]:
    """Yield, after each walk through the model, the divergence of the usual model from the original, and
    those of the units measured so far from the usual model, by the name of the replaced unit.

    tokens: ids `[batch, tokens]` to measure on. calibration: ids for the solver. limit: maximum number of
    streams. report: called before the first block, and when a stream has run through a block (`steps`).
    compared: called with the number of tokens whose predictions were compared, and their total. Tensors
    outside the blocks must be loaded. Results do not depend on which units are measured.
    """
    changes: dict[str, Divergence] = {}
    pending = deque(sorted(units, key=lambda unit: -1 if unit.block is None else unit.block))
    streams: list[_Stream] = []
    while pending and pending[0].block is None:
        unit = pending.popleft()
        embedding, head = replacer.outside(unit)
        streams.append(_Stream(unit.name, [skeleton.embed(ids, embedding) for ids in tokens], head))
    original = [skeleton.embed(ids) for ids in tokens]
    usual, entering = original, [skeleton.embed(ids) for ids in calibration]
    report()  # the time left counts from here: embedding and head took longer than a step
    start, of_usual, final = 0, None, []  # of_usual: of the usual model, whose final states are `final`
    while pending or streams:
        next_walk = None
        for index, _ in walk.blocks(skeleton, only=range(start, len(skeleton.blocks))):
            stored, started = replacer.usual(index, entering), []
            while pending and pending[0].block == index:
                if len(streams) + len(started) >= limit:
                    next_walk = next_walk or (index, usual, entering)
                    break
                unit = pending.popleft()
                replaced = {**stored, **replacer.measured(unit, entering)}
                states = _run(skeleton, index, usual, _weights(skeleton, replaced))
                started.append(_Stream(unit.name, states))
                report()
            original = original if of_usual else _run(skeleton, index, original, {})
            values = _weights(skeleton, stored)
            for stream in streams:
                stream.states = _run(skeleton, index, stream.states, values)
                report()
            if of_usual is None or (pending and next_walk is None):
                usual, entering = (_run(skeleton, index, states, values) for states in (usual, entering))
            streams += started
            del values, stored  # memory for the next block
        if of_usual is None:
            final = usual
            of_usual = _divergences(skeleton, original, [_Stream("", usual)])[""]
        changes |= _divergences(skeleton, final, streams, compared)
        yield of_usual, changes
        streams = []
        if next_walk:
            start, usual, entering = next_walk


def _weights(skeleton: Skeleton, values: Values) -> Values:
    """Return weights by the names of parameters in a block, in the dtype in which the block runs."""
    return {f"{name}.weight": weight.to(skeleton.dtype) for name, weight in values.items()}


def _run(skeleton: Skeleton, index: int, states: States, values: Values) -> States:
    return [skeleton.trace_block(index, hidden, values) for hidden in states]


def _divergences(
    skeleton: Skeleton,
    reference: States,
    streams: Sequence[_Stream],
    compared: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Divergence]:
    """Return the KL divergence of each stream from the reference's predictions, a mean over tokens, by unit.
    The reference's predictions are computed once for all streams."""
    size = divergence.chunk_tokens(skeleton.checkpoint.text_config.vocab_size)
    losses: dict[str, list[Tensor]] = {stream.unit: [] for stream in streams}
    done, total = 0, sum(hidden.shape[:2].numel() for hidden in reference)
    compared(done, total)
    for batch, hidden in enumerate(reference):
        for start in range(0, hidden.shape[:2].numel(), size):
            span = slice(start, start + size)
            expected = skeleton.logits(hidden.flatten(0, 1)[span]).float().log_softmax(-1)
            for stream in streams:
                states = stream.states[batch].flatten(0, 1)[span]
                replaced = skeleton.logits(states, values=stream.head).float().log_softmax(-1)
                losses[stream.unit].append(divergence.of_log_probs(expected, replaced).cpu())
            compared(done := done + len(expected), total)
    return {unit: _mean(torch.cat(parts).double()) for unit, parts in losses.items()}


def _mean(losses: Tensor) -> Divergence:
    spread = losses.std().item() if len(losses) > 1 else 0.0
    return {"mean": losses.mean().item(), "stderr": spread / len(losses) ** 0.5}
