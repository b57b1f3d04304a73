"""A conversation through llama.cpp, which keeps its cache from one request to the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantkit.capacity import attention, kv_cache
from quantkit.capacity import source as capacity_source
from quantkit.errors import USAGE, QuantkitError
from quantkit.evaluation.sampling import Sampling
from quantkit.grids import kv_types
from quantkit.models.files import gguf_file
from quantkit.serving.chat.turn import Answer, Facts, Prompt, Stream
from quantkit.serving.engines import llamacpp

STEP = 256  # tokens that llama.cpp rounds a context up to
TEMPLATE = "tokenizer.chat_template"
# By itself llama.cpp cuts the distribution, and takes what a model thinks out of its answers.
PLAIN = {"min_p": 0.0, "reasoning_format": "none", "timings_per_token": True, "cache_prompt": True}


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
        if chat and template is None and not metadata.get(TEMPLATE):
            raise QuantkitError(
                f"{source} has no chat template",
                "give one with --template FILE, or let it go on from text with --raw",
                USAGE,
            )
        context = -(-context // STEP) * STEP
        settings = llamacpp.parameters(path, context, threads=threads, kv_dtype=kv_dtype, device=device)
        if template is not None:
            settings.chat_template = template
        try:
            self._session = llamacpp.Session(settings)
        except QuantkitError as error:
            if template is None:
                raise
            hint = f"its template may be why: see whether it loads without --template. {error.hint}"
            raise QuantkitError(error.message, hint, error.exit_code) from error
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
        ask = self._session.complete if isinstance(prompt, str) else self._session.chat
        made = ask(prompt, sampling.tokens, stream, stopped, **asked)
        return self._told(made, sampling, stopped())

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
