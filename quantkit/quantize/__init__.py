"""Quantizing a checkpoint. Begin with `loop.py`."""
