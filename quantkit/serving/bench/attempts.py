"""Alternatives that are measured in turn. A failed alternative is reported and not tried again."""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Callable
from typing import Any

import torch

from quantkit.errors import UNSUPPORTED, QuantkitError, first_line
from quantkit.models.machine.device import give_back

REASON = 180  # characters of an error message that are kept


class Attempts:
    """Runs alternatives by name. failures: exceptions that say that an alternative does not run here.
    refused: name and reason of each alternative that failed."""

    def __init__(self, failures: tuple[type[Exception], ...], device: torch.device):
        self.failures, self.device = failures, device
        self.refused: dict[str, str] = {}

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """Return the result of `work`; None if it fails, or if the alternative has failed before."""
        if name in self.refused:
            return None
        try:
            return work()
        except self.failures as error:
            self.refused[name] = textwrap.shorten(first_line(error), REASON, placeholder=" …")
        gc.collect()
        give_back(self.device)
        return None

    def failure(self, what: str, hint: str) -> QuantkitError:
        """Return the error (exit code 4) if all failed. what: name of the alternatives, for the message."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
        return QuantkitError(f"no {what} ran: {reasons}", hint, UNSUPPORTED)
