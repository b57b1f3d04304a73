"""After compression: engines run what was made; bench measures them, serve and chat hand over to them.

No engine is written here. `engines/` is one file for each that is asked: transformers, llama.cpp, vLLM.
"""
