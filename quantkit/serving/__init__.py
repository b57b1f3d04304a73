"""Running checkpoints with engines: transformers, llama.cpp, and the servers of other projects."""
