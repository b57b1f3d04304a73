"""Alternatives that are measured in turn. A failed alternative is reported and not tried again."""

import gc
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quantkit.errors import UNSUPPORTED, QuantkitError, first_line
from quantkit.models.machine.device import give_back

REASON = 180  # characters of an error message that are kept


class Attempts:
    """Runs alternatives by name. failures: exceptions that say that an alternative does not run here.
    refused: name and reason of each alternative that failed."""

    def __init__(self, names: Sequence[str], failures: tuple[type[Exception], ...], device: torch.device):
        self.names, self.failures, self.device = names, failures, device
        self.refused: dict[str, str] = {}

    def turn(self, work: Callable[[str], Any], first: int = 0) -> dict[str, Any]:
        """Return the result of `work(name)` for each alternative that has not failed. first: index of the
        alternative that begins."""
        results = {}
        for name in (*self.names[first:], *self.names[:first]):
            if name in self.refused:
                continue
            try:
                results[name] = work(name)
            except self.failures as error:
                self.refused[name] = textwrap.shorten(first_line(error), REASON, placeholder=" …")
            if name in self.refused:  # the traceback is gone
                gc.collect()
                give_back(self.device)
        return results

    def failure(self, what: str, hint: str) -> QuantkitError:
        """Return the error (exit code 4) if all failed. what: name of the alternatives, for the message."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
        return QuantkitError(f"no {what} ran: {reasons}", hint, UNSUPPORTED)
