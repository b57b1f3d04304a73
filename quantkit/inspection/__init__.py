"""Inspect a checkpoint from headers and small files, without torch; values only on request.

`record.describe` makes the record, `show` prints it, `values.compare` compares two checkpoints.
"""
