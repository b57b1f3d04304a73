"""Conversations with a model; the KV cache is kept from turn to turn."""
