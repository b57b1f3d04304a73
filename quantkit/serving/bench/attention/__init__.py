"""Time and memory of attention implementations at growing lengths, labelled by the kernel that really ran.

`measure.py` runs them and counts allocations, `kernels.py` finds what ran, `fit.py` separates what grows with
N² from the rest, `show.py` makes the record and the report.
"""
