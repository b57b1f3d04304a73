"""Grids: the values a quantized weight may take. Pure tensor maths: no paths, no models, no devices chosen.

Begin with `grid.py` (what solvers ask of a grid) and `affine.py` (the plainest). `levels.py` rounds columns
for error feedback, `lookup.py` the values of nf4; `parallel.py` and `processor.py` keep both cores busy.
"""
