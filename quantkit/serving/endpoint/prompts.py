"""Prompts of a given length, by a seed: the same on every run, and no two alike.

They are plain words, which every endpoint takes; how many tokens a word makes of the model's tokenizer is
measured by asking. Each begins differently, so that no cache of prefixes answers for the model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water "
    "room mother area money story fact month lot right study book eye job word business side kind head "
    "house service friend father power hour game line end member law car city name team minute idea kid "
    "body back parent face level office door health person art war history party result change morning"
).split()
SHORT, LONG = 16, 80  # words of the prompts that the ruler is fitted to


def words(count: int, seed: int | str) -> str:
    """So many words."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


@dataclass(frozen=True)
class Ruler:
    """tokens = overhead + per_word × words. overhead: what a chat template and BOS add."""

    overhead: float = 0.0
    per_word: float = 1.0

    @staticmethod
    def fit(lengths: Sequence[tuple[int, int]]) -> Ruler:
        """Through two measured (words, tokens)."""
        (short, few), (long, many) = lengths
        per_word = max((many - few) / (long - short), 0.1)
        return Ruler(max(few - per_word * short, 0.0), per_word)

    def words(self, tokens: int) -> int:
        """How many make a prompt of about so many tokens."""
        return max(1, round((tokens - self.overhead) / self.per_word))
