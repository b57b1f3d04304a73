"""A conversation through transformers' `generate`, with a KV cache that is kept between turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date

import torch

from quantkit.evaluation.generate import Streamer, decode
from quantkit.evaluation.sampling import Sampling, ends_of_text, generate
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.serving.chat.kept_cache import KeptCache
from quantkit.serving.chat.session import Answer, ChatModel, Prompt, Stream, rendered
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
        self._module, facts = engine.load(checkpoint, dtype, device, context, decoded=decoded)
        self.model = ChatModel(
            source=checkpoint.source,
            engine=f"transformers {facts.version}",
            kernels=facts.kernels,
            device=str(device),
            dtype=facts.dtype,
            context=context,
            weight_bytes=facts.weight_bytes,
            notes=(facts.note,) if facts.note else (),
        )
        self._device = device
        self._checkpoint, self._tokenizer = checkpoint, checkpoint.tokenizer
        self._ends = ends_of_text(checkpoint)
        if self._tokenizer.eos_token_id not in (None, *self._ends):
            self._ends.append(self._tokenizer.eos_token_id)  # ends turns where the files disagree
        self._template = ChatTemplate(self._tokenizer, template, date.today())
        self._kept = KeptCache(self._module)

    def answer(
        self, prompt: Prompt, sampling: Sampling, stream: Stream, stopped: Callable[[], bool]
    ) -> Answer:
        """Answer a prompt until `stopped()` returns True. stream: receives the text as it is generated.

        Raises QuantkitError, before computing, if the prompt fills the context (exit code 5) or the chat
        template rejects it.
        """
        ids = self._encode(prompt)
        self._checkpoint.check_ids(ids)
        room = self.model.context - len(ids)
        if room < 1:
            raise context_full(len(ids), self.model.context)
        cache, cached, note = self._kept.begin(ids)
        limit, given = min(sampling.tokens, room), torch.tensor([ids], device=self._device)
        ticks = engine.Ticks(engine.clock_of(self._device), stopped)
        try:
            out = generate(
                self._module,
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
        text = out.sequences[0].tolist()
        self._kept.end(text)
        new = text[len(ids) :]
        ended = new[-1] in self._ends or (len(new) < limit and not stopped())
        return Answer(
            text=decode(self._tokenizer, new),
            prompt_tokens=len(ids),
            cached_tokens=cached,
            generated_tokens=len(new),
            prefill_seconds=ticks.times[1] - ticks.times[0],
            decode_seconds=ticks.times[-1] - ticks.times[1],
            stop="end" if ended else None,
            kv_bytes=engine.cache_bytes([out.get(name) for name in CACHES]),
            notes=(note,) if note else (),
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of the conversation, up to where the answer begins."""
        text = rendered(self._template, prompt)
        return self._tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]

    def close(self) -> None:
        """Free the model."""
        del self._module, self._kept
