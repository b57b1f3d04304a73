"""Inspect a checkpoint from headers and small files, without torch; values only on request.

`record.describe` puts it together, `printed` shows it, `compare.compare` sets two checkpoints against one
another. `contents` opens them, and is the one place that knows where they lie.
"""
