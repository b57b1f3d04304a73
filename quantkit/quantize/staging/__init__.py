"""Finished blocks on disk: the folder of a job in progress, its blocks, and the locks around it."""
