"""Runs an engine in a process of its own, in any Python: quantkit is not imported.

usage: wire.py MODULE, one of `in_*`. stdin: a JSON object, see `Engine.run`. stdout: a line of JSON,
{version, kernels, dtype, vocabulary}, then float32 logits `[positions, vocabulary]` of the scored
positions, window after window. All else that an engine prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

import numpy as np


def main() -> None:
    """Load the model, answer the request, and end the process."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    compute, facts = import_module(sys.argv[1]).load(request)
    for number, (ids, first) in enumerate(zip(request["windows"], request["first"], strict=True)):
        logits = np.ascontiguousarray(compute(ids)[first : len(ids) - 1], np.float32)
        if number == 0:  # some engines choose kernels when they first run
            out.write(json.dumps(facts() | {"vocabulary": logits.shape[1]}).encode() + b"\n")
        out.write(logits.data)
    out.flush()
    os._exit(0)  # threads of an engine would keep the process


if __name__ == "__main__":
    main()
