"""A conversation through llama.cpp, which keeps its cache from one request to the next.

Its text is written by quantkit: llama.cpp would run a stranger's template in this process, without limits.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from quantkit.capacity import attention, kv_cache
from quantkit.capacity import source as capacity_source
from quantkit.errors import USAGE, QuantkitError
from quantkit.evaluation.sampling import Sampling
from quantkit.models import kv_types
from quantkit.models.files import gguf_file
from quantkit.models.gguf.tokenizer import special_tokens
from quantkit.serving.chat.tokens import written
from quantkit.serving.chat.turn import Answer, Facts, Prompt, Stream
from quantkit.serving.engines import llamacpp
from quantkit.text.chat import ChatTemplate

STEP = 256  # tokens that llama.cpp rounds a context up to
TEMPLATE = "tokenizer.chat_template"
PLAIN = {"min_p": 0.0, "timings_per_token": True, "cache_prompt": True}  # by itself it cuts the distribution


class LlamaCppChat:
    """A GGUF file that answers. chat: whether it needs a chat template.

    Raises QuantkitError when it does not load, or has no template and none is given (exit code 2).
    """

    def __init__(
        self,
        source: str,
        path: Path,
        context: int,
        chat: bool = True,
        template: str | None = None,
        kv_dtype: str = "float16",
        device: str = "cpu",
        threads: int = 0,
    ):
        metadata, infos = gguf_file.read_header(path)
        stored = metadata.get(TEMPLATE)
        if template is None and isinstance(stored, str):
            template = stored
        if chat and not template:
            raise QuantkitError(
                f"{source} has no chat template",
                "give one with --template FILE, or let it go on from text with --raw",
                USAGE,
            )
        special = special_tokens(metadata) if chat else {}
        self._bos = special.get("bos")
        texts = {f"{role}_token": text for role, (_, text) in special.items()}
        known = SimpleNamespace(special_tokens_map=texts, get_chat_template=lambda given: given)
        self._template = ChatTemplate(known, template, date.today())
        context = -(-context // STEP) * STEP
        self._session = llamacpp.Session(
            llamacpp.parameters(path, context, threads=threads, kv_dtype=kv_dtype, device=device)
        )
        self._kv_bytes = _kv_bytes(path, context, kv_dtype)
        self._cached = 0
        types = sorted({info.dtype for info in infos.values() if len(info.shape) > 1})
        self.facts = Facts(
            source=source,
            engine=f"llama.cpp (xllamacpp {llamacpp.version()})",
            kernels="ggml",
            device=device,
            dtype=" ".join(types),
            context=context,
            weight_bytes=sum(info.nbytes for info in infos.values()),
        )

    def answer(
        self, prompt: Prompt, sampling: Sampling, stream: Stream, stopped: Callable[[], bool]
    ) -> Answer:
        """See `Engine`."""
        asked = PLAIN | {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        text = self._begun(written(self._template, prompt))
        made = self._session.complete(text, sampling.tokens, stream, stopped, **asked)
        return self._told(made, sampling, stopped())

    def _begun(self, text: str) -> str | list[int | str]:
        """A prompt without a second BOS: llama.cpp puts one before texts where the vocabulary says so."""
        text = text.encode(errors="replace").decode()  # halves of characters are no JSON to llama.cpp
        number, bos = self._bos or (0, "")
        return [number, text[len(bos) :]] if bos and text.startswith(bos) else text

    def _told(self, made: llamacpp.Answer, sampling: Sampling, stopped: bool) -> Answer:
        told: dict[str, Any] = {"cache_n": 0, "prompt_n": 0, "predicted_n": 0, **made.timings}
        cached, fresh, new = (int(told[name]) for name in ("cache_n", "prompt_n", "predicted_n"))
        stop = made.stop
        if stop == "length" and new < sampling.tokens:
            stop = "interrupted" if stopped else "context"
        before, self._cached = self._cached, max(0, cached + fresh + new - 1)
        return Answer(
            text=made.text,
            prompt_tokens=cached + fresh,
            cached_tokens=cached,
            prefilled_tokens=fresh,
            dropped_tokens=max(0, before - cached),
            generated_tokens=new,
            prefill_seconds=told.get("prompt_ms", 0.0) / 1e3,
            decode_seconds=told.get("predicted_ms", 0.0) / 1e3,
            stop=stop,
            kv_bytes=self._kv_bytes,
        )

    def forget(self) -> None:
        """See `Engine`. llama.cpp holds its cache for as long as the model; what is in it is overwritten."""

    def close(self) -> None:
        """See `Engine`."""
        self._session.__exit__()


def _kv_bytes(path: Path, context: int, kv_dtype: str) -> int | None:
    """Of the whole context, which llama.cpp allocates at once; None where its shape is not known."""
    try:
        read = capacity_source.read(str(path))
        caches = attention.layer_caches(read.settings, read.parameters)
    except (QuantkitError, attention.Unsupported):
        return None
    return kv_cache.sequence_bytes(caches, context, kv_types.TYPES[kv_dtype].nbytes)
