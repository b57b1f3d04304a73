"""A conversation through transformers' `generate`, with a KV cache that is kept between turns."""

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
    """Answers with a checkpoint. Raises QuantkitError (exit code 5) if it does not fit the memory."""

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
        self._checkpoint, self._tokenizer = checkpoint, checkpoint.tokenizer
        self._ends = ends_of_text(checkpoint)
        if self._tokenizer.eos_token_id not in (None, *self._ends):
            self._ends.append(self._tokenizer.eos_token_id)  # ends turns where the files disagree
        self._tokens = Tokens(self._tokenizer, template, self._ends)
        self._kept = KeptCache(self._model)

    def answer(
        self, prompt: Prompt, sampling: Sampling, stream: Stream, stopped: Callable[[], bool]
    ) -> Answer:
        """Answer a prompt until `stopped()` returns True. stream: receives the text as it is generated.

        Raises QuantkitError, before computing, if the prompt fills the context (exit code 5) or the chat
        template rejects it.
        """
        ids = self._tokens.encode(prompt)
        self._checkpoint.check_ids(ids)
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
            self._kept.forget()  # the cache may be incomplete
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
    """Tokenizes a conversation so that earlier answers keep the tokens that the model generated.

    Tokenizing generated text again may give other tokens ([he][llo] becomes [hello]); nothing after them
    would be found in the cache. So only the text after the last answer is tokenized.
    ends: ids that end an answer; they are dropped, since templates write them themselves."""

    def __init__(self, tokenizer: Any, template: str | None, ends: Collection[int]):
        self._tokenizer, self._ends = tokenizer, ends
        self._template = ChatTemplate(tokenizer, template, date.today())
        self._prompt = ""  # text of the prompt that was encoded last
        self._known: list[tuple[str, list[int]]] = []  # the text after each answer, and its tokens

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of the conversation, up to where the answer begins.

        Raises QuantkitError if the chat template rejects it.
        """
        text = self._prompt = written(self._template, prompt)
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
        """Return the text of `answer`, given to the prompt `ids`; keep its tokens for the next turn."""
        text = decode(self._tokenizer, answer)
        body = answer[:-1] if answer and answer[-1] in self._ends else answer
        if self._spelled(body) == text:  # no special tokens, no half character
            self._known.append((self._prompt + text, [*ids, *body]))
        return text

    def _spelled(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
