"""Time and memory of attention implementations at growing lengths, labelled by the kernel that really ran.

`measure.py` runs them and counts allocations, `show.py` makes the report.
"""
