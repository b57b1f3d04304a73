"""Which row of a linear each channel of another's inputs follows, read off by doubling rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.quantize.transforms.probe import Observation, Probe, alike, assign

GRANULES = 16, 64  # rows of a fused linear tried together, up to LARGE and beyond: heads are multiples
LARGE = 4096


@dataclass(frozen=True)
class Following:
    """What enters at `place` while rows of linear `name` change; before: what enters as they are."""

    probe: Probe
    place: str
    name: str
    before: Observation

    def rows(self) -> Tensor | None:
        """For every channel that enters, the row it is proportional to, `[in]`.

        Rows that act on nothing but single channels are found by halving; which of them a channel follows
        is then read off bit by bit: with bit k of their number set, rows are doubled, and channels with them.
        """
        out_features = self.probe.block.get_submodule(self.name).out_features
        granule = math.gcd(out_features, GRANULES[out_features > LARGE])
        everything = torch.arange(out_features, device=self.before.output.device)
        if self._response(everything) is _UNMOVED:
            return None
        rows = torch.cat(list(self._proportional(everything, granule)) or [everything[:0]])
        if not len(rows):
            return None
        numbers = torch.zeros(self._entering.shape[-1], dtype=torch.long, device=rows.device)
        response = self._response(rows)
        if not isinstance(response, Tensor) or not response.all():
            return None  # some channel follows no row
        for bit in range((len(rows) - 1).bit_length()):
            marked = rows[(torch.arange(len(rows), device=rows.device) >> bit) & 1 == 1]
            response = self._response(marked)
            if response is None:
                return None
            if isinstance(response, Tensor):
                numbers |= response.long() << bit
        return rows[numbers] if int(numbers.max()) < len(rows) else None

    @property
    def _entering(self) -> Tensor:
        return self.before.inputs[self.place]

    def _proportional(self, rows: Tensor, granule: int) -> Iterator[Tensor]:
        """The parts of `rows` in proportion to which channels move, and nothing else of them."""
        response = self._response(rows)
        if isinstance(response, Tensor):
            yield rows
        elif response is None and len(rows) > granule:
            half = len(rows) // granule // 2 * granule or granule
            for part in (rows[:half], rows[half:]):
                if len(part):
                    yield from self._proportional(part, granule)

    def _response(self, rows: Tensor):
        """Which channels double, bool `[in]`, when these rows do.

        _UNMOVED when none does, None when any moves otherwise, or is zero and cannot tell.
        """
        module = self.probe.block.get_submodule(self.name)
        with self.probe.restored():
            for part in ("weight", "bias"):
                if getattr(module, part, None) is not None:
                    changed = getattr(module, part).detach().clone()
                    changed[rows] *= 2
                    assign(self.probe.block, f"{self.name}.{part}", changed)
            after = self.probe.run().inputs[self.place]
        if after.shape != self._entering.shape:
            return None  # tokens were routed otherwise
        after, expected = after.flatten(0, -2), self._entering.flatten(0, -2)
        doubled = (after * expected).sum(0) > 1.5 * expected.square().sum(0)
        if not expected.any(0).all() or not alike(after, expected * (1 + doubled.float())):
            return None
        return doubled if doubled.any() else _UNMOVED


_UNMOVED = object()
