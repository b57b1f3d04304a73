"""A conversation through transformers' own `generate`, over a cache that is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from quantkit.evaluation.generate import Streamer
from quantkit.evaluation.sampling import Sampling, ends_of_text, generation_config
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.serving.chat.kept_cache import KeptCache, nbytes
from quantkit.serving.chat.tokens import Tokens
from quantkit.serving.chat.turn import Answer, Facts, Prompt, Stream
from quantkit.serving.context import ContextFullError
from quantkit.serving.engines import transformers as engine

CACHES = ("past_key_values", "cache_params")  # what models call theirs


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
        today: date | None = None,
    ):
        loaded = engine.load(checkpoint, dtype, device, context, decoded=decoded)
        self.facts = Facts(
            source=checkpoint.source,
            engine=f"transformers {engine.version()}",
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
            self._ends.append(self._tokenizer.eos_token_id)  # which ends turns where the files disagree
        self._tokens = Tokens(self._tokenizer, template, today or date.today(), self._ends)
        self._kept = KeptCache(self._model)

    def answer(
        self, prompt: Prompt, sampling: Sampling, stream: Stream, stopped: Callable[[], bool]
    ) -> Answer:
        """See `Engine`."""
        ids = self._tokens.encode(prompt)
        room = self.facts.context - len(ids)
        if room < 1:
            raise ContextFullError(len(ids), self.facts.context)
        before = len(self._kept.ids)
        cache, cached, note = self._kept.begin(ids)
        watch = _Watch(self._tokenizer, stream)
        asked = Sampling(
            min(sampling.tokens, room), sampling.temperature, sampling.seed, sampling.top_k, sampling.top_p
        )
        try:
            with _Counted(self._model) as fed:
                out = self._generate(ids, asked, cache, watch, stopped)
        except BaseException:
            self._kept.forget()  # it may hold a part of a token
            raise
        found = out.sequences[0].tolist()
        self._kept.end(found)
        new = found[len(ids) :]
        held = next((out[name] for name in CACHES if out.get(name) is not None), None)
        return Answer(
            text=self._tokens.answered(ids, new),
            prompt_tokens=len(ids),
            cached_tokens=cached,
            prefilled_tokens=fed[0],
            dropped_tokens=before - cached,
            generated_tokens=len(new),
            prefill_seconds=watch.first - watch.began,
            decode_seconds=watch.last - watch.first,
            stop=self._why(new, asked, sampling, stopped()),
            kv_bytes=nbytes(held) if held is not None else None,
            notes=(note,) if note else (),
        )

    def _why(self, new: list[int], asked: Sampling, wanted: Sampling, stopped: bool) -> str:
        if new[-1] in self._ends:
            return "end"
        if len(new) < asked.tokens:
            return "interrupted" if stopped else "end"
        return "context" if asked.tokens < wanted.tokens else "length"

    def _generate(
        self, ids: list[int], sampling: Sampling, cache: Any, watch: _Watch, stopped: Callable[[], bool]
    ) -> Any:
        given = torch.tensor([ids], device=self._device)
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(sampling.seed)
            return self._model.generate(
                given,
                attention_mask=torch.ones_like(given),
                generation_config=generation_config(sampling, self._ends),
                stopping_criteria=[_Stop(stopped)],
                streamer=watch,
                return_dict_in_generate=True,
                **({"past_key_values": cache} if cache is not None else {}),
            )

    def forget(self) -> None:
        """See `Engine`."""
        self._kept.forget()

    def close(self) -> None:
        """See `Engine`."""
        del self._model, self._kept


class _Counted:
    """Counts the tokens that every call of the model is given: what was really computed."""

    def __init__(self, model: nn.Module):
        self._model = model

    def __enter__(self) -> list[int]:
        fed: list[int] = []

        def count(module: nn.Module, args: tuple, named: dict[str, Any]) -> None:
            fed.append((args[0] if args else named["input_ids"]).shape[1])

        self._hook = self._model.register_forward_pre_hook(count, with_kwargs=True)
        return fed

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


class _Watch(Streamer):
    """Notes when the first token came, and the last."""

    def __init__(self, tokenizer: Any, stream: Stream):
        super().__init__(tokenizer, stream)
        self.began = self.first = self.last = time.monotonic()
        self._puts = 0

    def put(self, value: Tensor) -> None:
        """The prompt, then token by token."""
        super().put(value)
        self._puts += 1
        self.last = time.monotonic()
        if self._puts == 2:
            self.first = self.last


class _Stop(transformers.StoppingCriteria):
    def __init__(self, stopped: Callable[[], bool]):
        self._stopped = stopped

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self._stopped(), dtype=torch.bool, device=input_ids.device)
