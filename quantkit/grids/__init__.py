"""Grids: the values a quantized weight may take. Pure tensor maths: no paths, no models, no devices chosen.

Begin with `grid.py` (what solvers ask of a grid) and `affine.py` (the plainest). `levels.py` rounds columns
for error feedback, `parallel.py` keeps all cores busy.
"""
