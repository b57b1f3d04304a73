"""A conversation through llama.cpp, which keeps its cache from one request to the next.

quantkit renders the chat template: llama.cpp would run the file's template in this process without limits.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from quantkit.capacity.source import cache_bytes
from quantkit.evaluation.sampling import Sampling
from quantkit.models.files import gguf_file
from quantkit.serving.chat.session import Answer, Facts, Prompt, Stream, written
from quantkit.serving.engines import llamacpp

CONTEXT_STEP = 256  # llama.cpp rounds contexts up to a multiple of this
PLAIN = {"min_p": 0.0, "timings_per_token": True, "cache_prompt": True}  # min_p is not 0 by default


class LlamaCppChat:
    """Answers with a GGUF file. The constructor raises QuantkitError if the file does not load."""

    def __init__(
        self,
        source: str,
        path: Path,
        context: int,
        template: str | None = None,
        kv_dtype: str = "float16",
        device: str = "cpu",
        threads: int = 0,
    ):
        metadata, infos = gguf_file.read_header(path)
        self._template, self._bos = llamacpp.chat_template(metadata, template, date.today())
        context = -(-context // CONTEXT_STEP) * CONTEXT_STEP
        self._session = llamacpp.Session(
            llamacpp.parameters(path, context, threads=threads, kv_dtype=kv_dtype, device=device)
        )
        self._kv_bytes = cache_bytes(path, context, kv_dtype)  # llama.cpp allocates all of it at once
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
        """Answer a prompt, as `TransformersChat.answer` does."""
        names = ("temperature", "top_k", "top_p", "seed")
        fields = PLAIN | {name: getattr(sampling, name) for name in names}
        text = written(self._template, prompt).encode(errors="replace").decode()  # no half characters
        given: str | list[int | str] = text
        number, bos = self._bos
        if bos and text.startswith(bos) and not isinstance(prompt, str):
            given = [number, text[len(bos) :]]  # llama.cpp puts one before a text where the file says so
        answer, timings, ended = self._session.complete(given, sampling.tokens, stream, stopped, **fields)
        counts: dict[str, Any] = {"cache_n": 0, "prompt_n": 0, "predicted_n": 0, **timings}
        cached, fresh, new = (int(counts[name]) for name in ("cache_n", "prompt_n", "predicted_n"))
        return Answer(
            text=answer,
            prompt_tokens=cached + fresh,
            cached_tokens=cached,
            generated_tokens=new,
            prefill_seconds=counts.get("prompt_ms", 0.0) / 1e3,
            decode_seconds=counts.get("predicted_ms", 0.0) / 1e3,
            stop="end" if ended else None,
            kv_bytes=self._kv_bytes,
        )

    def close(self) -> None:
        """Free the model."""
        self._session.close()
