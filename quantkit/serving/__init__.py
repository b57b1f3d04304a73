"""After compression: engines run what was made; bench measures them, serve and chat hand over to them.

No engine is written here. `engines/` is one file for each that is asked: transformers, llama.cpp, vLLM.
`server/` starts an engine's own server, `endpoint/` puts load on any of them, `bench/` measures checkpoints,
`chat/` talks to one, `specdec/` asks whether a draft makes it faster.
"""
