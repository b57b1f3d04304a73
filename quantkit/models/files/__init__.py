"""Containers of named tensors: safetensors folders and GGUF files. No code here knows what a tensor means."""
