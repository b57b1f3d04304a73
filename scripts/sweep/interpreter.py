"""Whether the kernel can run: on a GPU, or on a CPU in Triton's interpreter."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec


def unavailable(device: str) -> str | None:
    """Return why `triton_sweep` cannot be imported for a device, else None.

    On a CPU the interpreter is asked for: Triton decides for it when it is first imported.
    """
    if find_spec("triton") is None:
        return "triton is not installed"
    if device == "cpu":
        if "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
            return "triton was imported without its interpreter"
        os.environ["TRITON_INTERPRET"] = "1"
    return None
