"""The loop that makes a checkpoint smaller: `loop.py` is where to begin."""
