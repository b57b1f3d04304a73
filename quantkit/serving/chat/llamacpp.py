"""A conversation through llama.cpp, which keeps its cache from one request to the next.

quantkit renders the chat template: llama.cpp would run the file's template in this process without limits.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantkit.capacity.source import cache_bytes
from quantkit.evaluation.sampling import Sampling
from quantkit.models.files import gguf_file
from quantkit.models.machine.device import choose_device
from quantkit.serving.chat.session import Answer, Stream
from quantkit.serving.chat.settings import ChatSettings
from quantkit.serving.engines import EngineFacts, llamacpp

SAMPLING = ("temperature", "top_k", "top_p", "seed")  # names in llama.cpp's requests, too


class LlamaCppChat:
    """Answers with a GGUF file. The constructor raises QuantkitError if the file does not load."""

    def __init__(
        self, source: str, path: Path, settings: ChatSettings, context: int, template: str | None = None
    ):
        device, kv_dtype = choose_device(settings.device).type, settings.kv_dtype or "float16"
        metadata, infos = gguf_file.read_header(path)
        self.template, self._bos = llamacpp.chat_template(metadata, template)
        context = llamacpp.padded(context)
        self._server = llamacpp.LlamaCppServer(
            llamacpp.parameters(path, context, settings.cores, kv_dtype=kv_dtype, device=device)
        )
        self._kv_bytes = cache_bytes(path, context, kv_dtype)  # llama.cpp allocates all of it at once
        self.source, self.context = source, context
        self.name = f"llama.cpp (xllamacpp {llamacpp.version()})"
        self.facts = EngineFacts(
            version=llamacpp.version(),
            weight_bytes=sum(info.nbytes for info in infos.values()),
            kernels="ggml",
            packed=True,
            dtype=" ".join(sorted({info.dtype for info in infos.values() if len(info.shape) > 1})),
            device=device,
        )

    def answer(
        self, text: str, raw: bool, sampling: Sampling, stream: Stream, stopped: Callable[[], bool]
    ) -> Answer:
        """Continue a text, as `TransformersChat.answer` does."""
        prompt: str | list[int | str] = text.encode(errors="replace").decode()  # no half characters
        bos_id, bos = self._bos
        if bos and not raw and text.startswith(bos):
            prompt = [bos_id, prompt[len(bos) :]]  # llama.cpp puts one before a text where the file says so
        texts: list[str] = []
        last: dict[str, Any] = {}

        def receive(chunk: Mapping[str, Any]) -> None:
            last.update(chunk.get("timings") or {})
            for choice in chunk.get("choices", ()):
                last["reason"] = choice.get("finish_reason") or last.get("reason")
                texts.append(choice.get("text") or "")
                if texts[-1]:
                    stream(texts[-1])

        request = {name: getattr(sampling, name) for name in SAMPLING}
        request |= {"prompt": prompt, "n_predict": sampling.tokens, "cache_prompt": True}
        request |= {"min_p": 0.0, "timings_per_token": True}  # llama.cpp's default of min_p is not 0
        self._server.stream(request, receive, stopped)
        cached, computed, new = (int(last.get(name, 0)) for name in ("cache_n", "prompt_n", "predicted_n"))
        return Answer(
            text="".join(texts),
            prompt_tokens=cached + computed,
            cached_tokens=cached,
            generated_tokens=new,
            prefill_seconds=last.get("prompt_ms", 0.0) / 1e3,
            decode_seconds=last.get("predicted_ms", 0.0) / 1e3,
            stop="end" if last.get("reason") == "stop" else None,
            kv_bytes=self._kv_bytes,
        )

    def close(self) -> None:
        """Free the model."""
        self._server.close()
