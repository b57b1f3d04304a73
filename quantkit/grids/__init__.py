"""Grids: the values a quantized weight may take. Begin with `grid.py`."""
