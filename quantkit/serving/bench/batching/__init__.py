"""One trace of requests through static, dynamic and continuous batching: throughput, latency and waste.

`trace.py` makes the requests and counts costs, `padded.py` and `continuous.py` serve the requests;
`measure.py` runs all of it, `show.py` makes the report.
"""
