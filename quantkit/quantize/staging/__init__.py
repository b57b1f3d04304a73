"""Finished blocks on disk: the staging folder of a running job, its blocks, and its lock."""

PART_BYTES = 1 << 20  # codes of a block in memory before they are staged
ACCELERATED_PART_BYTES = 1 << 27  # an accelerator makes a block in less time than a disk syncs many files
