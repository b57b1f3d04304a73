"""What llama.cpp expects of a GGUF file, and how to undo it: metadata, names, row orders, tokenizers."""
