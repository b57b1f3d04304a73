"""GGUF files as llama.cpp expects them, written and read: metadata, names, order of rows, tokenizers."""
