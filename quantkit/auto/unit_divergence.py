"""Sensitivity: what one unit changes in the KL divergence at the output, in bounded memory.

Hidden states of a few tokens flow block by block through the original and the usual model, with all units in
their usual candidates. At a block, each of its units is replaced by other candidates in turn. The
block's output begins a stream that runs through all later blocks. At the output its divergence from the
original is measured, less that of the usual model. Units are replaced among the errors of all others, because
errors interact: on the demo model at 3.1 bits, divergences of single units in the original predicted a gain
of 17 percent, changes of the usual model a gain of 1, and 1 was measured.

One block is in memory at a time, and a limited number of streams; for the others the model is walked again
from the block at which the limit was reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.auto.curve import Divergence
from quantkit.auto.scaling import exchanged
from quantkit.auto.solving import Solving, States, Values
from quantkit.auto.units import Candidate, Unit
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import walk

CHUNK_BYTES = 1 << 26  # float32 logits in memory at a time, of each compared model


@dataclass(frozen=True)
class Found:
    """usual: divergence of the usual model; changes: its change by {(unit, candidate)}, by their names."""

    usual: Divergence
    changes: dict[tuple[str, str], Divergence]


@dataclass
class _Stream:
    """Hidden states with one unit stored as one candidate. head: context for computing logits."""

    key: tuple[str, str]
    states: States
    head: Callable[[], AbstractContextManager[None]] = nullcontext


def measure(
    skeleton: Skeleton,
    units: Sequence[Unit],
    tokens: Sequence[Tensor],
    calibration: Sequence[Tensor],
    replacer: Solving,
    room: int,
    heard: Callable[[Unit], None] = lambda unit: None,
    walked: Callable[[Found], None] = lambda found: None,
) -> Found:
    """Return the change of divergence by each candidate of each unit.

    tokens: ids `[batch, tokens]` to measure on; calibration: ids to solve by; room: most streams in memory;
    heard: called with each unit whose streams have begun; walked: called with the results after each walk
    through the model. Tensors outside the blocks are loaded. A unit's result does not depend on other units.
    """
    changes: dict[tuple[str, str], Divergence] = {}
    pending = deque(sorted(units, key=lambda unit: -1 if unit.block is None else unit.block))
    streams: list[_Stream] = []
    while pending and pending[0].block is None:
        unit = pending.popleft()
        for candidate in replacer.wanted(unit):
            streams.append(_outside(skeleton, unit, candidate, tokens, replacer))
        heard(unit)
    original = [skeleton.embed(ids) for ids in tokens]
    usual, entering = original, [skeleton.embed(ids) for ids in calibration]
    start, output = 0, None
    while pending or streams:
        left = None  # start of the next walk
        for index, block in walk.blocks(
            skeleton, lambda index: (None, True), only=range(start, len(skeleton.blocks))
        ):
            values, born = _weights(replacer.usual(index, entering)), []
            while pending and pending[0].block == index:
                taken = len(streams) + len(born)
                if taken and taken + len(replacer.wanted(pending[0])) > room:
                    left = left or (index, usual, entering)
                    break
                unit = pending.popleft()
                for candidate, other in replacer.of_block(unit, entering):
                    with exchanged(block, values | _weights(other)):
                        states = _run(skeleton, index, usual)
                    born.append(_Stream((unit.name, candidate.name), states))
                heard(unit)
            original = original if output else _run(skeleton, index, original)
            with exchanged(block, values):
                for stream in streams:
                    stream.states = _run(skeleton, index, stream.states)
                if output is None or (pending and left is None):
                    usual, entering = _run(skeleton, index, usual), _run(skeleton, index, entering)
            streams += born
        output = output or _Output(skeleton, original, usual)
        changes |= {stream.key: output.change(stream) for stream in streams}
        walked(Found(output.usual, changes))
        streams = []
        if left:
            start, usual, entering = left
    return Found(output.usual, changes)


def _outside(
    skeleton: Skeleton, unit: Unit, candidate: Candidate, tokens: Sequence[Tensor], replacer: Solving
) -> _Stream:
    """Return a stream with another embedding or output matrix, or both if they are tied."""
    with replacer.outside(unit, candidate):
        states = [skeleton.embed(ids) for ids in tokens]
    return _Stream((unit.name, candidate.name), states, lambda: replacer.outside(unit, candidate))


def _weights(values: Values) -> dict[str, Tensor]:
    return {f"{name}.weight": part for name, part in values.items()}


def _run(skeleton: Skeleton, index: int, states: States) -> States:
    return list(skeleton.outputs(index, states))


class _Output:
    """Divergences at the output, from final hidden states of the original and the usual model."""

    def __init__(self, skeleton: Skeleton, original: States, usual: States):
        self._skeleton, self._original = skeleton, original
        self._usual = self._of(_Stream(("", ""), usual))
        self.usual = _divergence(self._usual)

    def change(self, stream: _Stream) -> Divergence:
        """Return the divergence of a stream less that of the usual model, averaged over tokens."""
        return _divergence(self._of(stream) - self._usual)

    def _of(self, stream: _Stream) -> Tensor:
        """Return the KL divergence from the original, `[tokens]`, computed in chunks."""
        skeleton, found = self._skeleton, []
        size = max(1, CHUNK_BYTES // (4 * skeleton.checkpoint.text_config.vocab_size))
        for batch, row, part in _places(self._original, size):
            expected = _log_probs(skeleton, self._original[batch][row, part])
            with stream.head():
                log_probs = _log_probs(skeleton, stream.states[batch][row, part])
            found.append((expected - log_probs).mul_(expected.exp()).sum(-1).cpu())
        return torch.cat(found).double()


def _log_probs(skeleton: Skeleton, hidden: Tensor) -> Tensor:
    return torch.log_softmax(skeleton.logits(hidden).float(), -1)


def _places(states: States, size: int) -> Iterator[tuple[int, int, slice]]:
    """Yield batch, row and a slice of `size` tokens."""
    for batch, hidden in enumerate(states):
        for row in range(len(hidden)):
            for start in range(0, hidden.shape[1], size):
                yield batch, row, slice(start, start + size)


def _divergence(kld: Tensor) -> Divergence:
    spread = kld.std().item() if len(kld) > 1 else 0.0
    return Divergence(kld.mean().item(), spread / len(kld) ** 0.5)
