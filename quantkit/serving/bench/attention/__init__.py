"""Time and memory of attention implementations at growing lengths, and the kernel that each one ran.

`measure.py` runs them and counts allocations, `show.py` makes the report.
"""
