"""GGUF files as llama.cpp expects them, written and read: metadata, names, row orders, tokenizers."""
