"""llama.cpp runs a GGUF file: inside this process, by the xllamacpp wheel, as llama.cpp's own server would.

Its timings are llama.cpp's: milliseconds and tokens of prompt (`prompt_n`; `cache_n` more came from the
cache) and of generation (`predicted_n`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError

PACKAGE = "xllamacpp"
SILENT = -1  # verbosity: its errors come back as answers
KV_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}


@dataclass(frozen=True)
class Answer:
    """text: what was generated. timings: llama.cpp's own. stop: "length" or "end"."""

    text: str
    timings: Mapping[str, float]
    stop: str


def version() -> str | None:
    """Of the wheel; None where it is not installed."""
    return metadata.version(PACKAGE) if util.find_spec(PACKAGE) else None


def library() -> Any:
    """The wheel itself. Raises QuantkitError (exit code 4) where it is not installed."""
    if version() is None:
        raise QuantkitError("llama.cpp is not installed", f"install it: pip install {PACKAGE}", UNSUPPORTED)
    return import_module(PACKAGE)


def parameters(
    path: Path, context: int, slots: int = 1, threads: int = 0, kv_dtype: str = "float16", device: str = "cpu"
) -> Any:
    """llama.cpp's settings for a file: `context` tokens for each of `slots` sequences.

    threads: 0 for llama.cpp's own choice. kv_dtype: a name of `KV_TYPES`. device: cpu, or whatever
    llama.cpp was built for. Raises QuantkitError for a KV type that it has not (exit code 2), or where the
    wheel is not installed (4).
    """
    if kv_dtype not in KV_TYPES:
        names = ", ".join(KV_TYPES)
        raise QuantkitError(f"llama.cpp has no KV cache of {kv_dtype}", f"choose one of {names}", USAGE)
    wheel = library()
    made = wheel.CommonParams()
    made.model.path = str(path)
    made.n_ctx, made.n_parallel, made.kv_unified = context * slots, slots, False
    if threads:
        made.cpuparams.n_threads = made.cpuparams_batch.n_threads = threads
    made.cache_type_k = made.cache_type_v = getattr(wheel.ggml_type, f"GGML_TYPE_{KV_TYPES[kv_dtype]}")
    made.n_gpu_layers = 0 if device == "cpu" else -1
    made.verbosity, made.ui, made.fit_params = SILENT, False, False
    made.hostnames, made.port = ["127.0.0.1"], 0
    return made


class Session:
    """A loaded file that answers requests. `with Session(parameters(...)) as session:`."""

    def __init__(self, settings: Any):
        """Raises QuantkitError when llama.cpp does not load the file."""
        self.settings = settings
        try:
            self._server = import_module(PACKAGE).Server(settings)
        except RuntimeError as error:
            raise QuantkitError(
                f"llama.cpp does not load {settings.model.path}",
                "quantkit inspect says what is in it; see whether memory is free",
                UNSUPPORTED,
            ) from error

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._server = None  # its destructor ends llama.cpp's threads

    @property
    def address(self) -> str:
        """Where its OpenAI API listens, such as http://127.0.0.1:40123."""
        return self._server.listening_address

    def complete(
        self,
        prompt: str | Sequence[int],
        tokens: int,
        stream: Callable[[str], None] | None = None,
        **asked: Any,
    ) -> Answer:
        """Continue a text or token ids by `tokens` at most. asked: llama.cpp's own fields, such as
        temperature (0 unless given), seed, ignore_eos, cache_prompt."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        request = {"prompt": given, "n_predict": tokens, "temperature": 0} | asked
        return self._ask(self._server.handle_completions, request, stream)

    def complete_all(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        arrived: Callable[[int, Mapping[str, float]], None],
    ) -> None:
        """Continue all prompts at once by exactly `tokens` tokens each, greedily and from the beginning.

        arrived: told which prompt has new tokens, with llama.cpp's timings of it so far.
        Raises QuantkitError with llama.cpp's words.
        """

        def receive(chunk: Mapping[str, Any]) -> None:
            for choice in chunk.get("choices", ()):
                arrived(choice["index"], chunk["timings"])

        request = {"prompt": [list(ids) for ids in prompts], "n_predict": tokens, "temperature": 0}
        exact = {"ignore_eos": True, "cache_prompt": False, "timings_per_token": True}
        self._stream(self._server.handle_completions, request | exact, receive)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        tokens: int,
        stream: Callable[[str], None] | None = None,
        **asked: Any,
    ) -> Answer:
        """The answer to a conversation, by the file's own chat template; only what is new is prefilled."""
        request = {"messages": list(messages), "max_tokens": tokens, "temperature": 0} | asked
        return self._ask(self._server.handle_chat_completions, request, stream)

    def _ask(self, handle: Callable, request: dict[str, Any], stream: Callable[[str], None] | None) -> Answer:
        parts: list[str] = []
        last: dict[str, Any] = {}

        def receive(chunk: Mapping[str, Any]) -> None:
            last.update(chunk)
            for choice in chunk.get("choices", ()):
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                last["reason"] = choice.get("finish_reason") or last.get("reason")
                parts.append(text)
                if text and stream:
                    stream(text)

        self._stream(handle, request, receive)
        return Answer(
            "".join(parts), last.get("timings", {}), "end" if last.get("reason") == "stop" else "length"
        )

    def _stream(
        self, handle: Callable, request: dict[str, Any], receive: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """Send a request, and pass on its chunks. Raises QuantkitError with llama.cpp's words."""
        errors: list[Any] = []

        def chunk(told: Mapping[str, Any] | None) -> bool:
            if told and "error" in told:
                errors.append(told["error"])
            elif told:
                receive(told)
            return False  # go on

        handle(request | {"stream": True}, chunk)
        if errors:
            said = errors[0].get("message", errors[0]) if isinstance(errors[0], Mapping) else errors[0]
            raise QuantkitError(f"llama.cpp: {said}")
