"""Containers: how named tensors lie in files. They know bytes, not what the tensors mean."""
