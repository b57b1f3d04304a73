"""Speculative decoding: a draft model proposes k tokens, the target model checks them in one pass."""
