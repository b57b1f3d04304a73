"""Inspects a checkpoint: from headers and small files, without torch; reads values only on request.

`record.describe` makes the record, `show` prints it, `values.compare` compares two checkpoints.
"""
