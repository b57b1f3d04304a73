"""Grids: the values that a quantized weight may have. Pure tensor maths without paths, models or devices.

Begin with `grid.py` (the base class, with all that solvers need) and `affine.py` (the simplest grid).
`levels.py` rounds columns for error feedback; `parallel.py` keeps all cores busy.
"""
