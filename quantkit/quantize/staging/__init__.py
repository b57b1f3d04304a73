"""Finished blocks on disk: the staging folder of a running job, its blocks, and its lock."""

PART_BYTES = 1 << 20  # of a block's codes that wait in memory before they are staged
