"""The imports of a command that loads a model: half of what a data-free job of a small model takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import without looking for cyclic garbage: of modules nothing becomes garbage, and looking through a
    million objects again and again is an eighth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
