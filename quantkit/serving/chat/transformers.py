"""A conversation through transformers' `generate`, with a KV cache that is kept between turns."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from quantkit.evaluation.generate import equal_beginning, streamer
from quantkit.evaluation.sampling import Sampling, ends_of_text, generate
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton.caches import parameter_of
from quantkit.serving.chat.session import Answer, Stream
from quantkit.serving.chat.settings import ChatSettings
from quantkit.serving.engines import context_full
from quantkit.serving.engines import transformers as engine
from quantkit.text.chat import ChatTemplate

CACHES = ("past_key_values", "cache_params")  # argument names of caches
TOKENWISE = {DynamicLayer, DynamicSlidingWindowLayer, DummyLayer}  # classes with one entry per token
ANEW = "the whole prompt is prefilled"


class TransformersChat:
    """Answers with a checkpoint. Raises QuantkitError (exit code 5) if it does not fit the memory."""

    def __init__(
        self, checkpoint: Checkpoint, settings: ChatSettings, context: int, template: str | None = None
    ):
        self._module, self.facts = engine.load(checkpoint, settings, context, settings.decoded)
        self.source, self.context = checkpoint.source, context
        self.name = f"transformers {self.facts.version}"
        self._checkpoint, self._tokenizer = checkpoint, checkpoint.tokenizer
        self._ends = ends_of_text(checkpoint)
        if self._tokenizer.eos_token_id not in (None, *self._ends):
            self._ends.append(self._tokenizer.eos_token_id)  # ends turns where the files disagree
        self.template = ChatTemplate(self._tokenizer, template, date.today())
        self._kept = KeptCache(self._module)

    def answer(
        self, text: str, raw: bool, sampling: Sampling, stream: Stream, stopped: Callable[[], bool]
    ) -> Answer:
        """Continue a text until `stopped()` returns True. raw: the text is not of a chat template. stream:
        receives the answer as it is generated.

        Raises QuantkitError (exit code 5), before computing, if the text fills the context.
        """
        ids = self._tokenizer(text, add_special_tokens=raw)["input_ids"]
        self._checkpoint.check_ids(ids)
        room = self.context - len(ids)
        if room < 1:
            raise context_full(len(ids), self.context)
        cache, cached, note = self._kept.begin(ids)
        limit = min(sampling.tokens, room)
        ticks = engine.Ticks(self._module.device, stopped)
        try:
            out = generate(
                self._module,
                torch.tensor([ids], device=self._module.device),
                replace(sampling, tokens=limit),
                self._ends,
                {"return_dict_in_generate": True},
                stopping_criteria=[ticks],
                streamer=streamer(self._tokenizer, stream),
                **({parameter_of(self._module.forward): cache} if cache is not None else {}),
            )
        except BaseException:
            self._kept.forget()  # the cache may be incomplete
            raise
        all_ids = out.sequences[0].tolist()
        self._kept.end(all_ids)
        new = all_ids[len(ids) :]
        ended = new[-1] in self._ends or (len(new) < limit and not stopped())
        return Answer(
            text=self._tokenizer.decode(new, skip_special_tokens=True),
            prompt_tokens=len(ids),
            cached_tokens=cached,
            generated_tokens=len(new),
            prefill_seconds=ticks.times[1] - ticks.times[0],
            decode_seconds=ticks.times[-1] - ticks.times[1],
            stop="end" if ended else None,
            kv_bytes=engine.cache_bytes([out.get(name) for name in CACHES]),
            notes=(note,) if note else (),
        )

    def close(self) -> None:
        """Free the model."""
        del self._module, self._kept


class KeptCache:
    """A model's KV cache for one sequence, and the ids of the cached tokens, kept for the next turn.

    A chat template may rewrite earlier turns (for example drop thoughts), and tokenizing generated text again
    may give other tokens. So the new prompt is compared with the cached tokens, and the cache is cropped to
    the common prefix. The state of a recurrent layer cannot be cropped: such models begin each turn anew.
    """

    def __init__(self, model: nn.Module):
        self._config = model.config
        kinds = {type(layer) for layer in DynamicCache(config=self._config).layers}
        self._slides = DynamicSlidingWindowLayer in kinds
        self._keeps = model._supports_default_dynamic_cache() and kinds <= TOKENWISE
        self._keeps &= parameter_of(model.forward) is not None
        self.forget()

    def forget(self) -> None:
        """Start with an empty cache."""
        self._ids: list[int] = []
        self._cache, self._recorded_from = DynamicCache(config=self._config), 0
        if self._keeps:
            self._cache.activate_past_recording()  # windows then keep the current turn too

    def begin(self, ids: Sequence[int]) -> tuple[DynamicCache | None, int, str]:
        """Return the cache for a turn, the number of tokens of the prompt `ids` in it, and a note.

        The last token of the prompt never counts as cached, since the next token is computed from it. The
        cache is None for models with recurrent layers.
        """
        if not self._keeps:
            return None, 0, f"the cache of this model cannot be continued: {ANEW}"
        shared, note = equal_beginning(self._ids, ids[:-1]), ""
        if self._slides and shared < self._recorded_from:
            shared, note = 0, f"a sliding window no longer holds the place of the change: {ANEW}"
        if shared:
            self._cache.crop(shared - len(self._ids))
            self._ids, self._recorded_from = self._ids[:shared], shared
        else:
            self.forget()
        return self._cache, shared, note

    def end(self, ids: Sequence[int]) -> None:
        """Record that the cache now holds `ids` (prompt and answer) except the last, which was not fed in."""
        if self._keeps:
            self._ids = list(ids[: self._cache.get_seq_length()])
