"""Time and memory of attention implementations at growing lengths, labelled by the kernel that really ran.

    result = measure(checkpoint, Settings(("eager", "sdpa"), lengths=()), dtype, device, progress)
    show(result, console); record(result); draw(result, figure)

`measurement` counts allocations, `kernels` finds what ran, `fit` separates what grows with N² from the rest.
"""

from quantkit.serving.bench.attention.measurement import Result, Row, measure
from quantkit.serving.bench.attention.report import SCHEMA, draw, record, show
from quantkit.serving.bench.attention.settings import Settings

__all__ = ["SCHEMA", "Result", "Row", "Settings", "draw", "measure", "record", "show"]
