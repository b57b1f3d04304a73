"""Transforms: rewrites of a block that keep its function and make its weights easier to quantize."""
