"""Prompts of random tokens. Cost depends only on their number, except in mixtures of experts: routers spread
random tokens more evenly over experts than text."""

import random
from collections.abc import Iterable


def draw(lengths: Iterable[int], vocab_size: int, seed: str) -> list[list[int]]:
    """Return token ids for prompts of these lengths, the same for every model with this vocabulary size. Ids
    near both ends, where special tokens are, do not occur."""
    chance = random.Random(seed)
    low, high = vocab_size // 4, max(vocab_size // 2, vocab_size // 4 + 1)
    return [[chance.randrange(low, high) for _ in range(length)] for length in lengths]
