"""Speculative decoding: a draft guesses k tokens, the target checks them in one pass. Does it pay?

Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding",
arXiv:2211.17192.
`acceptance_rate.py` has the paper's formulas. `transformers.py` and `llamacpp.py` note an engine's steps.
`measure.py` sums up numbers k against the target alone. `lossless.py` proves that nothing changed. `job.py`
takes one draft after the other; `show.py` prints.
"""
