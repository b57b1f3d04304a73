"""Running checkpoints with engines: transformers, llama.cpp, and the servers of other projects.

`engines/` has one file per engine. `server/` starts an engine's own server, `bench/` measures speed and
memory, `chat/` talks to a model, `specdec/` measures whether a draft model makes generation faster.
"""
