"""Keys and values of the tokens that a model has seen, kept for the next turn.

A chat template may write former turns anew (leave out what a model thought, say), and text that a model wrote
may be cut into other tokens when it is read. So tokens are compared with those that are cached, and the cache
is cropped to what both begin with.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

# Of other layers (states of a recurrence, indexed keys) not every family reads what a former call has left
# when it is given several tokens at once: Jamba and Bamba of transformers 5.23 begin anew.
KEPT = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)


class KeptCache:
    """A cache for one sequence of tokens, and which tokens those are."""

    def __init__(self, model: nn.Module):
        self._config = model.config
        self.ids: list[int] = []
        self._cache = self._fresh()
        self._recorded_from = 0
        self.keeps = all(type(layer) in KEPT for layer in self._cache.layers)
        self._slides = any(self._cache.is_sliding)

    def _fresh(self) -> DynamicCache:
        cache = DynamicCache(config=self._config)
        cache.activate_past_recording()  # a window keeps the turn's tokens, too, so that it can be cropped
        return cache

    def forget(self) -> None:
        """Begin anew."""
        self.ids, self._cache, self._recorded_from = [], self._fresh(), 0

    def begin(self, ids: Sequence[int]) -> tuple[DynamicCache | None, int, str]:
        """The cache for a turn whose prompt is `ids`, how many of them it holds, and a note for the user.

        Never all of them: what follows the last one is computed from it. None: the model keeps nothing that
        could be gone on from.
        """
        if not self.keeps:
            return None, 0, "this model's cache cannot be gone on from: all is prefilled anew"
        shared = _common(self.ids, ids[:-1])
        note = ""
        if shared < self._recorded_from and self._slides:
            note = "a sliding window has lost what this turn goes back to: all is prefilled anew"
            shared = 0
        if shared:
            self._cache.crop(shared - len(self.ids))
            self.ids, self._recorded_from = self.ids[:shared], shared
        else:
            self.forget()
        return self._cache, shared, note

    def end(self, ids: Sequence[int]) -> None:
        """The turn is over: prompt and answer are `ids`, of which the last was not fed to the model."""
        if self.keeps:
            self.ids = list(ids[: self._cache.get_seq_length()])


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))


def nbytes(cache: Cache) -> int:
    """Of all keys, values and states of a cache."""
    tensors = itertools.chain.from_iterable(_tensors(vars(layer)) for layer in cache.layers)
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values())


def _tensors(values: dict[str, Any]) -> Iterator[Tensor]:
    for value in values.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value)
