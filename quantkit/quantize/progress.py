"""The listener that the loop reports to. This one is silent; the command line has one that prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.layouts import LinearSpec


class Progress:
    """A silent listener. `cli.progress` has listeners for terminals and for logs."""

    def phase(self, text: str) -> None:
        """Report that a step outside the loop began."""

    def step(self, number: int, total: int) -> None:
        """Report that step `number` of `total` began; each has phases and blocks of its own."""

    def start(self, blocks: int, done: int) -> None:
        """Report that the loop begins; `done` of `blocks` blocks are already staged."""

    def linear(self, spec: LinearSpec, record: Mapping[str, Any]) -> None:
        """Report that a linear was quantized. record: its entry in the manifest."""

    def block(self, index: int, replayed: bool) -> None:
        """Report that block `index` is finished. replayed: it was already staged and only run."""

    def warn(self, text: str) -> None:
        """Report a warning. It is shown at any verbosity."""

    def counting(self, what: str, done: int, total: int) -> None:
        """Report that `done` of `total` equal steps of `what` are finished."""

    def evaluating(self, source: str, done: int, total: int) -> None:
        """Report that `done` of `total` blocks of a model were evaluated."""
        self.counting(f"evaluating {source}", done, total)


SILENT = Progress()
