"""Sensitivity: the KL divergence at the output when one unit alone is replaced, in bounded memory.

The hidden states of a few tokens flow through the unquantized model block by block. At a block, each of its
units is replaced by each of its candidates in turn, and what the block then leaves begins a stream of its
own: it runs on through all later blocks beside the others, and its distance from the unperturbed stream is
taken at the output. One block is in memory at a time, and at most so many streams; where there are more, the
model is walked again from the block at which there was no room left.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from quantkit.capacity.budget.curve import Divergence
from quantkit.capacity.budget.units import Candidate, Unit
from quantkit.models.skeleton import Skeleton
from quantkit.quantize import walk

CHUNK_BYTES = 1 << 26  # float32 logits held at a time, for each of the models that are compared
PATIENCE = 60.0  # seconds in which a walk takes in units
ENOUGH = 0.25  # of the room, that is taken by then
States = list[Tensor]  # batches of hidden states, `[batch, tokens, hidden]`
Values = Mapping[str, Tensor]  # weights `[out, in]` by the names of linears inside a block


Found = dict[tuple[str, str], Divergence]  # by the names of unit and candidate


class Replacer(Protocol):
    """How units are stored otherwise; see `candidates.py`."""

    def wanted(self, unit: Unit) -> Sequence[Candidate]:
        """Which candidates of a unit are to be measured."""

    def of_block(self, unit: Unit, entering: States) -> Iterator[tuple[Candidate, Values]]:
        """The weights of each of these in a block that is loaded, solved by the states that enter it."""

    def outside(self, unit: Unit, candidate: Candidate) -> AbstractContextManager[None]:
        """As long as it is open, the model computes with a matrix outside the blocks replaced."""


@dataclass
class _Stream:
    """Hidden states with one unit stored as one candidate. head: opened where logits are computed."""

    key: tuple[str, str]
    states: States
    head: Callable[[], AbstractContextManager[None]] = nullcontext


def measure(
    skeleton: Skeleton,
    units: Sequence[Unit],
    tokens: Sequence[Tensor],
    calibration: Sequence[Tensor],
    replacer: Replacer,
    room: int,
    heard: Callable[[Unit], None] = lambda unit: None,
    walked: Callable[[Found], None] = lambda found: None,
) -> Found:
    """Divergence by the names of unit and candidate. tokens: ids `[batch, tokens]` to measure on;
    calibration: ids to solve by; room: how many streams may be in memory; heard: of each unit whose streams
    have begun; walked: of what is known after each walk through the model. What lies outside the blocks is
    loaded. A unit's divergences do not depend on what is measured beside it.
    """
    found: Found = {}
    pending = deque(sorted(units, key=lambda unit: -1 if unit.block is None else unit.block))
    streams: list[_Stream] = []
    while pending and pending[0].block is None:
        unit = pending.popleft()
        for candidate in replacer.wanted(unit):
            streams.append(_outside(skeleton, unit, candidate, tokens, replacer))
        heard(unit)
    reference = [skeleton.embed(ids) for ids in tokens]
    entering = [skeleton.embed(ids) for ids in calibration]
    start, final = 0, None
    while pending or streams:
        left, entrance = None, _Entrance(room)  # left: block and states with which the next walk begins
        for index, block in walk.blocks(
            skeleton, lambda index: (None, True), only=range(start, len(skeleton.blocks))
        ):
            born: list[_Stream] = []
            while pending and pending[0].block == index:
                taken = len(streams) + len(born)
                if taken and not entrance.is_open(taken, len(replacer.wanted(pending[0]))):
                    left = left or (index, reference, entering)
                    break
                unit = pending.popleft()
                for candidate, values in replacer.of_block(unit, entering):
                    with exchanged(block, values):
                        states = _run(skeleton, index, reference)
                    born.append(_Stream((unit.name, candidate.name), states))
                heard(unit)
            for stream in streams:
                stream.states = _run(skeleton, index, stream.states)
            streams += born
            reference = _run(skeleton, index, reference)
            if pending and left is None:
                entering = _run(skeleton, index, entering)
        final = final or reference
        found |= _compared(skeleton, final, streams)
        walked(found)
        streams = []
        if left:
            start, reference, entering = left
    return found


class _Entrance:
    """Where units join a walk. Their divergences are known once it has reached the output, so it takes in no
    more after a while, in which case little is lost if it never does; but enough for the walk to pay."""

    def __init__(self, room: int):
        self._room, self._until = room, time.monotonic() + PATIENCE

    def is_open(self, taken: int, more: int) -> bool:
        """To so many streams beside those that there are."""
        late = time.monotonic() > self._until and taken >= ENOUGH * self._room
        return not late and taken + more <= self._room


def _outside(
    skeleton: Skeleton, unit: Unit, candidate: Candidate, tokens: Sequence[Tensor], replacer: Replacer
) -> _Stream:
    """A stream that is other from the embedding on, and at the output matrix where that is the same."""
    with replacer.outside(unit, candidate):
        states = [skeleton.embed(ids) for ids in tokens]
    return _Stream((unit.name, candidate.name), states, lambda: replacer.outside(unit, candidate))


def _run(skeleton: Skeleton, index: int, states: States) -> States:
    return list(skeleton.outputs(index, states))


@contextmanager
def exchanged(block: nn.Module, values: Values) -> Iterator[None]:
    """A block with other weights in some of its linears, as long as this is open."""
    modules = {name: block.get_submodule(name) for name in values}
    own = {name: module.weight for name, module in modules.items()}
    try:
        for name, module in modules.items():
            weight = values[name].to(own[name].device, own[name].dtype)
            module.weight = nn.Parameter(weight, requires_grad=False)
        yield
    finally:
        for name, module in modules.items():
            module.weight = own[name]


def _compared(skeleton: Skeleton, reference: States, streams: Sequence[_Stream]) -> Found:
    """KL divergence of every stream from the reference, over all tokens, chunk by chunk."""
    sums: dict[tuple[str, str], list[Tensor]] = {stream.key: [] for stream in streams}
    size = max(1, CHUNK_BYTES // (4 * skeleton.checkpoint.text_config.vocab_size))
    for batch, row, part in _places(reference, size):
        expected = _log_probs(skeleton, reference[batch][row, part])
        weights = expected.exp()
        for stream in streams:
            with stream.head():
                log_probs = _log_probs(skeleton, stream.states[batch][row, part])
            sums[stream.key].append((expected - log_probs).mul_(weights).sum(-1).cpu())
    return {key: _divergence(torch.cat(parts).double()) for key, parts in sums.items()}


def _log_probs(skeleton: Skeleton, hidden: Tensor) -> Tensor:
    return torch.log_softmax(skeleton.logits(hidden).float(), -1)


def _places(states: States, size: int) -> Iterator[tuple[int, int, slice]]:
    """Batch, row and `size` tokens of it."""
    for batch, hidden in enumerate(states):
        for row in range(len(hidden)):
            for start in range(0, hidden.shape[1], size):
                yield batch, row, slice(start, start + size)


def _divergence(kld: Tensor) -> Divergence:
    spread = kld.std().item() if len(kld) > 1 else 0.0
    return Divergence(kld.mean().item(), spread / len(kld) ** 0.5)
