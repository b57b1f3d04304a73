"""Keys and values of the tokens that a model has seen, kept for the next turn.

A chat template may write former turns anew (leave out what a model thought, say), and text that a model wrote
may be cut into other tokens when it is read. So tokens are compared with those that are cached, and the cache
is cropped to what both begin with.
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

TOKENWISE = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)  # which keep something of each token
PROBED = 4, 3  # tokens before and after, of the trial whether states are gone on from
ANEW = "all is prefilled anew"


class KeptCache:
    """A cache for one sequence of tokens, and which tokens those are."""

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
        """Begin anew."""
        self.ids: list[int] = []
        self._cache, self._recorded_from = DynamicCache(config=self._config), 0
        if self._crops:
            self._cache.activate_past_recording()  # a window keeps the turn's tokens, too, to be cropped

    def begin(self, ids: Sequence[int]) -> tuple[DynamicCache | None, int, str]:
        """The cache for a turn whose prompt is `ids`, how many of them it holds, and a note for the user.

        Never all of them: what follows the last one is computed from it. None: the model keeps nothing that
        could be gone on from.
        """
        if not self.keeps:
            return None, 0, f"this model's cache cannot be gone on from: {ANEW}"
        parted, note = first_difference(self.ids, ids[:-1]), ""
        shared = len(self.ids) if parted is None else parted
        if not self._crops and shared < len(self.ids):
            shared, note = 0, f"the state of a recurrence cannot be taken back: {ANEW}"
        elif self._slides and shared < self._recorded_from:
            shared, note = 0, f"a sliding window has lost what this turn goes back to: {ANEW}"
        if not shared:
            self.forget()
        elif self._crops:
            self._cache.crop(shared - len(self.ids))
            self.ids, self._recorded_from = self.ids[:shared], shared
        return self._cache, shared, note

    def end(self, ids: Sequence[int]) -> None:
        """The turn is over: prompt and answer are `ids`, of which the last was not fed to the model."""
        if self.keeps:
            self.ids = list(ids[: self._cache.get_seq_length()])


def goes_on(model: nn.Module) -> bool:
    """Whether a recurrence goes on from the state that a former call left, several tokens at a time.

    Tried, since not every family does (Jamba of transformers 5.23 begins anew): without the state of the
    first such layer what follows has to be different. False where there is no attention beside it, whose
    cache would tell how many tokens were seen.
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
