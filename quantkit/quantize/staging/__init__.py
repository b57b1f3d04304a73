"""Finished blocks on disk: the folder of a job in progress, its blocks, and the locks around it."""

PART_BYTES = 1 << 20  # of a block's codes that wait in memory before they are staged
