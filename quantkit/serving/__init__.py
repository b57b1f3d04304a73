"""Running checkpoints: engines run them, bench measures engines, serve and chat start them.

quantkit writes no engine. `engines/` is one file per engine: transformers, llama.cpp, llama.cpp's server.
`server/` starts an engine's own server, `endpoint/` puts load on a server, `bench/` measures checkpoints,
`chat/` talks to one, `specdec/` measures whether a draft makes one faster.
"""
