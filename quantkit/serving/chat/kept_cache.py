"""Keys and values of the tokens that a model has seen, kept for the next turn.

A chat template may rewrite earlier turns (for example drop thoughts), and tokenizing generated text again may
give other tokens. So the new prompt is compared with the cached tokens, and the cache is cropped to the
common prefix.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from quantkit.evaluation.generate import first_difference

TOKENWISE = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)  # classes with one entry per token
PROBED = 4, 3  # tokens before and after the tested state
ANEW = "the whole prompt is prefilled"


class KeptCache:
    """A model's KV cache for one sequence, and the ids of the cached tokens."""

    def __init__(self, model: nn.Module):
        self._config = model.config
        kinds = {type(layer) for layer in DynamicCache(config=self._config).layers}
        self._crops = kinds <= set(TOKENWISE)
        self._slides = DynamicSlidingWindowLayer in kinds
        self.keeps = model._supports_default_dynamic_cache() and (
            self._crops or (kinds <= {*TOKENWISE, LinearAttentionLayer} and goes_on(model))
        )
        self.forget()

    def forget(self) -> None:
        """Start with an empty cache."""
        self.ids: list[int] = []
        self._cache, self._recorded_from = DynamicCache(config=self._config), 0
        if self._crops:
            self._cache.activate_past_recording()  # windows then keep the current turn too

    def begin(self, ids: Sequence[int]) -> tuple[DynamicCache | None, int, str]:
        """Return the cache for a turn, the number of tokens of the prompt `ids` in it, and a note.

        The last token of the prompt never counts as cached, since the next token is computed from it. The
        cache is None for models whose cache cannot be continued.
        """
        if not self.keeps:
            return None, 0, f"the cache of this model cannot be continued: {ANEW}"
        parted, note = first_difference(self.ids, ids[:-1]), ""
        shared = len(self.ids) if parted is None else parted
        if not self._crops and shared < len(self.ids):
            shared, note = 0, f"a recurrent state cannot be taken back: {ANEW}"
        elif self._slides and shared < self._recorded_from:
            shared, note = 0, f"a sliding window no longer holds the place of the change: {ANEW}"
        if not shared:
            self.forget()
        elif self._crops:
            self._cache.crop(shared - len(self.ids))
            self.ids, self._recorded_from = self.ids[:shared], shared
        return self._cache, shared, note

    def end(self, ids: Sequence[int]) -> None:
        """Record that the cache now holds `ids` (prompt and answer) except the last, which was not fed in."""
        if self.keeps:
            self.ids = list(ids[: self._cache.get_seq_length()])


def goes_on(model: nn.Module) -> bool:
    """Return whether recurrent layers continue from the cached state when given several tokens.

    Some families do not (Jamba in transformers 5.23 starts from zero). The test: setting the state of the
    first recurrent layer to zero must change the logits. Returns False for models without attention, since
    only the attention layers' cache counts tokens.
    """
    before, after = PROBED
    ids = torch.arange(before + after, device=model.device)[None] % model.config.get_text_config().vocab_size

    def logits(cache: DynamicCache, part: Tensor) -> Tensor:
        with torch.no_grad():
            return model(part, past_key_values=cache, use_cache=True).logits

    left = DynamicCache(config=model.config)
    if all(left.is_linear):
        return False
    logits(left, ids[:, :before])
    usual = logits(copy.deepcopy(left), ids[:, before:])
    for name in ("recurrent_states", "conv_states"):
        without = copy.deepcopy(left)
        states = getattr(without.layers[left.is_linear.index(True)], name).values()
        states = [state.zero_() for state in states if state is not None]
        if states and torch.equal(usual, logits(without, ids[:, before:])):
            return False
    return True
