"""Inspects a checkpoint: from headers and small files, without torch; reads values only on request."""
