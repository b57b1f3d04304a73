"""Speculative decoding: a draft model proposes k tokens, the target model checks them in one pass.

Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding",
arXiv:2211.17192.
`acceptance_rate.py` has the paper's formulas. `transformers.py` generates text and records the steps.
`measure.py` compares each k with the target alone. `lossless.py` checks that the text is the target's own.
`job.py` measures one draft after the other; `show.py` prints the result.
"""
