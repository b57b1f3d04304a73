"""Keys and values of the tokens that a model has seen, kept for the next turn.

A chat template may rewrite earlier turns (for example drop thoughts), and tokenizing generated text again may
give other tokens. So the new prompt is compared with the cached tokens, and the cache is cropped to the
common prefix. The state of a recurrent layer cannot be cropped: such models begin each turn anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from quantkit.evaluation.generate import first_difference

TOKENWISE = {DynamicLayer, DynamicSlidingWindowLayer, DummyLayer}  # classes with one entry per token
ANEW = "the whole prompt is prefilled"


class KeptCache:
    """A model's KV cache for one sequence, and the ids of the cached tokens."""

    def __init__(self, model: nn.Module):
        self._config = model.config
        kinds = {type(layer) for layer in DynamicCache(config=self._config).layers}
        self._slides = DynamicSlidingWindowLayer in kinds
        self.keeps = model._supports_default_dynamic_cache() and kinds <= TOKENWISE
        self.forget()

    def forget(self) -> None:
        """Start with an empty cache."""
        self.ids: list[int] = []
        self._cache, self._recorded_from = DynamicCache(config=self._config), 0
        if self.keeps:
            self._cache.activate_past_recording()  # windows then keep the current turn too

    def begin(self, ids: Sequence[int]) -> tuple[DynamicCache | None, int, str]:
        """Return the cache for a turn, the number of tokens of the prompt `ids` in it, and a note.

        The last token of the prompt never counts as cached, since the next token is computed from it. The
        cache is None for models with recurrent layers.
        """
        if not self.keeps:
            return None, 0, f"the cache of this model cannot be continued: {ANEW}"
        index, note = first_difference(self.ids, ids[:-1]), ""
        shared = len(self.ids) if index is None else index
        if self._slides and shared < self._recorded_from:
            shared, note = 0, f"a sliding window no longer holds the place of the change: {ANEW}"
        if shared:
            self._cache.crop(shared - len(self.ids))
            self.ids, self._recorded_from = self.ids[:shared], shared
        else:
            self.forget()
        return self._cache, shared, note

    def end(self, ids: Sequence[int]) -> None:
        """Record that the cache now holds `ids` (prompt and answer) except the last, which was not fed in."""
        if self.keeps:
            self.ids = list(ids[: self._cache.get_seq_length()])
