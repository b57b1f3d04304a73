"""A conversation through transformers' `generate`, with a cache that is kept between turns."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import date
from typing import Any

import torch
import transformers

from quantkit.evaluation.generate import Streamer, decode
from quantkit.evaluation.sampling import Sampling, ends_of_text, generate
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.serving.chat.kept_cache import KeptCache
from quantkit.serving.chat.session import Answer, Facts, Prompt, Stream, written
from quantkit.serving.engines import context_full
from quantkit.serving.engines import transformers as engine
from quantkit.text.chat import ChatTemplate

CACHES = ("past_key_values", "cache_params")  # argument names of caches


class TransformersChat:
    """A checkpoint that answers. Raises QuantkitError when it does not fit the memory (exit code 5)."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        context: int,
        decoded: bool = False,
        template: str | None = None,
    ):
        loaded = engine.load(checkpoint, dtype, device, context, decoded=decoded)
        self.facts = Facts(
            source=checkpoint.source,
            engine=f"transformers {transformers.__version__}",
            kernels=loaded.kernels,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            context=context,
            weight_bytes=loaded.weight_bytes,
            notes=(loaded.note,) if loaded.note else (),
        )
        self._model, self._device = loaded.model, device
        self._tokenizer = checkpoint.tokenizer
        self._ends = ends_of_text(checkpoint)
        if self._tokenizer.eos_token_id not in (None, *self._ends):
            self._ends.append(self._tokenizer.eos_token_id)  # ends turns where the files disagree
        self._tokens = Tokens(self._tokenizer, template, self._ends)
        self._kept = KeptCache(self._model)

    def answer(
        self, prompt: Prompt, sampling: Sampling, stream: Stream, stopped: Callable[[], bool]
    ) -> Answer:
        """Answer, passing text on as it is generated, until `stopped()`.

        Raises QuantkitError before anything is computed: for a prompt that fills the context (exit code 5),
        or does not fit the chat template.
        """
        ids = self._tokens.encode(prompt)
        room = self.facts.context - len(ids)
        if room < 1:
            raise context_full(len(ids), self.facts.context)
        cache, cached, note = self._kept.begin(ids)
        limit, given = min(sampling.tokens, room), torch.tensor([ids], device=self._device)
        ticks = engine.Ticks(engine.clock_of(self._device), stopped)
        try:
            out = generate(
                self._model,
                given,
                replace(sampling, tokens=limit),
                self._ends,
                stopping_criteria=[ticks],
                streamer=Streamer(self._tokenizer, stream),
                return_dict_in_generate=True,
                **({"past_key_values": cache} if cache is not None else {}),
            )
        except BaseException:
            self._kept.forget()  # it may be incomplete
            raise
        found = out.sequences[0].tolist()
        self._kept.end(found)
        new = found[len(ids) :]
        ended = new[-1] in self._ends or (len(new) < limit and not stopped())
        return Answer(
            text=self._tokens.answered(ids, new),
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
        del self._model, self._kept


class Tokens:
    """A conversation as token ids, with the same tokens for the text that the model has seen.

    Generated text may be split otherwise when it is read again: [he][llo] becomes [hello], and nothing after
    it would be cached. So answers keep their generated tokens, and only the text after them is tokenized.
    ends: ids that end an answer; templates write them themselves."""

    def __init__(self, tokenizer: Any, template: str | None, ends: Collection[int]):
        self._tokenizer, self._ends = tokenizer, ends
        self._template = ChatTemplate(tokenizer, template, date.today())
        self._asked = ""  # text of the prompt that was encoded last
        self._known: list[tuple[str, list[int]]] = []  # the text after each answer, and its tokens

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of the conversation, up to the beginning of the answer.

        Raises QuantkitError when it does not fit the template.
        """
        text = self._asked = written(self._template, prompt)
        ids = self._tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
        while self._known and not text.startswith(self._known[-1][0]):
            self._known.pop()  # retried or rewritten
        if self._known:
            known, before = self._known[-1]
            rest = self._tokenizer(text[len(known) :], add_special_tokens=False)["input_ids"]
            if self._spelled([*before, *rest]) == self._spelled(
                ids
            ):  # some tokenizers begin every text with a space
                return [*before, *rest]
        return ids

    def answered(self, ids: list[int], answer: list[int]) -> str:
        """Return the text of an answer to the prompt `ids`, and keep its tokens for the next turn."""
        text = decode(self._tokenizer, answer)
        body = answer[:-1] if answer and answer[-1] in self._ends else answer
        if self._spelled(body) == text:  # no special tokens, no half character
            self._known.append((self._asked + text, [*ids, *body]))
        return text

    def _spelled(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
