"""One trace of requests through static, dynamic and continuous batching: throughput, latency and waste.

`trace.py` makes the requests, `padded.py` and `continuous.py` serve them, `accounting.py` counts;
`measure.py` runs all of it, `show.py` makes the report.
"""
