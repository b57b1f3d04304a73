"""Finished blocks on disk: the staging folder of a running job, its blocks, and its lock."""

PART_BYTES = 1 << 20  # codes of a block in memory before they are staged
