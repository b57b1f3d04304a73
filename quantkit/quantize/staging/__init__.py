"""Finished blocks on disk: the staging folder of a running job, its blocks, and its lock."""
