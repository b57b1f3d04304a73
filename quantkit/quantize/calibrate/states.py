"""Hidden states of all tokens on their way through the blocks, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from quantkit.models.machine.device import Lane, free_memory, host_buffer, is_accelerator
from quantkit.quantize.calibrate.spill import Spill

SHARE = 0.25  # of an accelerator's free memory that states may take where nobody planned for them


@dataclass(frozen=True)
class Place:
    """Where states wait: `device`, `host`, or `disk`, in a file of `folder`."""

    where: str = "device"
    folder: Path | None = None


HERE = Place()


class States:
    """Batches of hidden states `[batch, tokens, hidden]`, or of all that flows from block to block, used on
    `device` and kept there, on the host, or in a file.

    Kept on the host, a batch is copied back while the next one is computed, and the next one copied ahead
    while this one is used. What is read is a batch on the device whatever the place.
    """

    def __init__(self, batches: Iterable[Tensor], device: torch.device, place: Place = HERE):
        self.on_host, on_host = False, place.where == "host" and is_accelerator(device)
        self.changes = 0  # batches that were replaced since the beginning
        self._device = device
        self._lane: Lane | None = None
        self._sent: dict[int, Tensor] = {}  # on their way to the device
        self._here: dict[int, Tensor] = {}  # the one that was read last
        self._kept: list[Tensor] | Spill = Spill(place.folder) if place.where == "disk" else []
        for hidden in batches:
            self._kept.append(_on_host(hidden) if on_host else hidden)
        if on_host:
            self.move_to_host()

    @property
    def spilled(self) -> bool:
        """Whether they wait in a file."""
        return isinstance(self._kept, Spill)

    def move_to_host(self) -> None:
        """From now on they wait in the host's memory, unless they are in a file."""
        if self.spilled:
            return
        self.on_host, self._lane = True, Lane(self._device)
        for k, hidden in enumerate(self._kept):
            self._kept[k] = _on_host(hidden)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, k: int) -> Tensor:
        if k in self._here:
            return self._here[k]
        if self.spilled:
            self._here = {}  # before another takes its place
            self._here = {k: self._kept[k].to(self._device)}
            return self._here[k]
        if not self.on_host:
            return self._kept[k]
        sent = self._sent.pop(k, None)
        hidden = self._lane.receive(self._lane.send(self._kept[k]) if sent is None else sent)
        ahead = k + 1
        self._sent = {at: sent for at, sent in self._sent.items() if at == ahead}
        if ahead < len(self) and ahead not in self._sent:
            self._sent[ahead] = self._lane.send(self._kept[ahead])
        self._here = {k: hidden}
        return hidden

    def __setitem__(self, k: int, hidden: Tensor) -> None:
        self.changes += 1
        self._here.pop(k, None)
        if not self.on_host:
            self._kept[k] = hidden
            return
        self._sent.pop(k, None)
        if hidden.shape != self._kept[k].shape:  # blocks left something beside their hidden states
            self._kept[k] = host_buffer(hidden)
        self._kept[k].copy_(hidden, non_blocking=True)

    def advance(self, outputs: Iterable[Tensor]) -> None:
        """Replace all batches by a block's outputs, which may be made of them one by one."""
        for k, hidden in enumerate(outputs):
            self[k] = hidden
        assert k + 1 == len(self), "as many outputs as batches"

    def __iter__(self) -> Iterator[Tensor]:
        return (self[k] for k in range(len(self)))


def embedded(
    ids: Sequence[Tensor],
    embed: Callable[[Tensor], Tensor],
    device: torch.device,
    place: Place | None = None,
) -> States:
    """States that enter the first block for batches of `ids`, kept at a place that was planned, or else where
    there is room for them."""
    first = embed(ids[0])
    if place is None:
        crowded = is_accelerator(device) and first.nbytes * len(ids) > SHARE * free_memory(device)
        place = Place("host") if crowded else HERE
    return States(chain([first], map(embed, ids[1:])), device, place)


def _on_host(hidden: Tensor) -> Tensor:
    """A copy in a buffer of the host that copies to the device can read beside other work."""
    if hidden.device.type == "cpu":
        return hidden
    buffer = host_buffer(hidden)
    buffer.copy_(hidden, non_blocking=True)
    return buffer
