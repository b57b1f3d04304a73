"""Shared by the programs `in_*.py`. Each runs an engine in a process of its own, in any Python: quantkit is
not imported.

stdin: one JSON object, {model, windows, first, options, device, attention, trust_remote_code}. stdout: a line
of JSON, {version, kernels, dtype, vocabulary}, then float32 logits `[positions, vocabulary]` of the scored
positions, window after window. All else that an engine prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

Compute = Callable[[list[int]], Any]  # from ids of a window to logits `[tokens, vocabulary]` for numpy
Facts = Callable[[], dict]  # called after the first window: some engines choose kernels when they first run


def answer(load: Callable[[dict], tuple[Compute, Facts]]) -> None:
    """Load the model with `load`, answer the request, and end the process."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    compute, facts = load(request)
    for number, (ids, first) in enumerate(zip(request["windows"], request["first"], strict=True)):
        logits = np.ascontiguousarray(compute(ids)[first : len(ids) - 1], np.float32)
        if number == 0:
            out.write(json.dumps(facts() | {"vocabulary": logits.shape[1]}).encode() + b"\n")
        out.write(logits.data)
    out.flush()
    os._exit(0)  # threads of an engine would keep the process
