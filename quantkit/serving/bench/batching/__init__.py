"""One trace of requests through static, dynamic and continuous batching: what each wastes, and what it earns.

    result = measure(checkpoint, trace, Settings(), dtype, device, progress)
    show(result, console); record(result); draw(result, figure)

`trace` makes the requests, `static`, `dynamic` and `continuous` serve them, `padded` runs the batches of the
first two, `accounting` counts, `proof` compares what they wrote.
"""

from quantkit.serving.bench.batching.measurement import Result, Settings, measure
from quantkit.serving.bench.batching.report import SCHEMA, draw, record, show
from quantkit.serving.bench.batching.trace import Lengths, Trace, read, sample

__all__ = [
    "SCHEMA", "Lengths", "Result", "Settings", "Trace", "draw", "measure", "read", "record", "sample", "show",
]  # fmt: skip
