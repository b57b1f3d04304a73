"""Speculative decoding: a draft model proposes k tokens, the target model checks them in one pass.

Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding",
arXiv:2211.17192.
`acceptance_rate.py` has the paper's formulas. `transformers.py` generates text, records the target's passes,
and compares texts. `measure.py` compares each draft and k with the target alone. `show.py` prints the result.
"""
