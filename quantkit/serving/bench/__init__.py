"""The cost of running a checkpoint: `quantkit bench`. Begin with `measure.py` and `worker.py`."""
