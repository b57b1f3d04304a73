"""Speculative decoding: a draft guesses k tokens, the target checks them in one pass. Does it pay?

Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding",
arXiv:2211.17192.
`theory.py` is the paper's formulas; `assisted.py` and `gguf.py` let engines do it and note every step;
`sweep.py` measures drafts and numbers k against the target alone; `lossless.py` proves that nothing changed.
"""
