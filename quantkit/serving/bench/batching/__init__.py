"""One trace of requests through static, dynamic and continuous batching: what each wastes, and what it earns.

`trace.py` makes the requests, `padded.py` and `continuous.py` serve them, `accounting.py` counts, `proof.py`
compares what they wrote; `measure.py` runs all of it, `show.py` makes the record and the report.
"""
