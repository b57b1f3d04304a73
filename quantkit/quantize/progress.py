"""Listener that the loop reports to. This one is silent; those of the command line print."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit.layouts import LinearSpec
    from quantkit.quantize.solvers import Solved


class Progress:
    """Silent listener. `cli.progress` has one for terminals and one for logs."""

    def phase(self, text: str) -> None:
        """A step outside the loop began."""

    def start(self, blocks: int, done: int) -> None:
        """The loop begins; `done` of `blocks` blocks are staged already and are only run."""

    def linear(self, spec: LinearSpec, solved: Solved) -> None:
        """A linear was quantized."""

    def block(self, index: int, replayed: bool) -> None:
        """Block `index` is finished."""

    def warn(self, text: str) -> None:
        """Report something the user should know at any verbosity."""

    def counting(self, what: str, done: int, total: int) -> None:
        """`done` of `total` equal steps of `what` are finished."""

    def evaluating(self, source: str, done: int, total: int) -> None:
        """A block of a model was evaluated."""
        self.counting(f"evaluating {source}", done, total)


SILENT = Progress()
