"""llama.cpp runs a GGUF file inside this process: the xllamacpp wheel contains llama.cpp's server.

Timings are llama.cpp's own, in milliseconds: `prompt_ms` for `prompt_n` computed prompt tokens (`cache_n`
more were cached), `predicted_ms` for `predicted_n` new tokens.
"""

from collections.abc import Callable, Mapping
from datetime import date
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.models import kv_types
from quantkit.models.files import gguf_file
from quantkit.models.gguf.tokenizer import special_tokens
from quantkit.serving.engines import context_full
from quantkit.text.chat import ChatTemplate, Conversation

PACKAGE = "xllamacpp"
OWN_TEMPLATE = "chatml"  # a built-in template: llama.cpp would render the file's own without limits
SILENT = -1  # verbosity without logs; errors are returned as answers
TOO_LONG = "exceed_context_size_error"


def version() -> str:
    """Return the version of the xllamacpp wheel."""
    return metadata.version(PACKAGE)


def padded(tokens: int) -> int:
    """Return the tokens of a sequence that llama.cpp allocates its cache for: a multiple of 256."""
    return -(-tokens // 256) * 256


def parameters(
    path: Path, context: int, threads: int, slots: int = 1, kv_dtype: str = "float16", device: str = "cpu"
) -> Any:
    """Return llama.cpp's settings for a file: `context` tokens for each of `slots` sequences.

    kv_dtype: a name of `kv_types.TYPES`. device: `cpu`; any other type puts all layers on the accelerator.
    Raises QuantkitError for a type that llama.cpp does not have (exit code 4).
    """
    kind = kv_types.in_engine("llama.cpp", kv_dtype).upper()
    wheel = import_module(PACKAGE)
    params = wheel.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.kv_unified = context * slots, slots, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_type_k = params.cache_type_v = getattr(wheel.ggml_type, f"GGML_TYPE_{kind}")
    params.n_gpu_layers = 0 if device == "cpu" else -1
    params.chat_template = OWN_TEMPLATE
    params.verbosity, params.ui, params.fit_params = SILENT, False, False
    params.hostnames, params.port, params.endpoint_metrics = ["127.0.0.1"], 0, True
    return params


def stored_template(metadata: Mapping[str, Any]) -> str | None:
    """Return the chat template stored in a GGUF file's metadata; None if there is none."""
    template = metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) and template else None


def chat_template(metadata: Mapping[str, Any], given: str | None) -> tuple[ChatTemplate, tuple[int, str]]:
    """Return (template, (id, text) of the BOS token). The template is `given`, or else the one stored in the
    GGUF file; quantkit renders it with limits. Without a BOS token the pair is (0, "")."""
    template = given or stored_template(metadata)
    special = special_tokens(metadata) if template else {}
    texts = {f"{role}_token": text for role, (_, text) in special.items()}
    tokenizer = SimpleNamespace(special_tokens_map=texts, get_chat_template=lambda name, tools: name)
    return ChatTemplate(tokenizer, template, date.today()), special.get("bos", (0, ""))


def check_templates(path: Path, question: str) -> None:
    """Render the chat templates of a GGUF file with limits, because llama.cpp's own server has none.

    Raises QuantkitError if one fails, or takes too long or too much memory.
    """
    metadata, _ = gguf_file.read_header(path)
    conversation = Conversation([{"role": "user", "content": question}], "a question")
    for name, template in metadata.items():
        if name.startswith("tokenizer.chat_template") and isinstance(template, str) and template:
            try:
                chat_template(metadata, template)[0].render(conversation, answer=True)
            except QuantkitError as error:
                hint = f"quantkit chat {path} --template FILE takes another one, or --raw none"
                why = f"{path} cannot be served: llama.cpp would run its chat template without limits, and "
                raise QuantkitError(why + error.message, hint, error.exit_code) from error


class LlamaCppServer:
    """A loaded GGUF file that answers requests until `close`."""

    def __init__(self, settings: Any):
        """Load the file. Raises QuantkitError if llama.cpp cannot."""
        try:
            self._server = import_module(PACKAGE).Server(settings)
        except RuntimeError as error:
            what = f"llama.cpp does not load {settings.model.path}"
            hint = "quantkit inspect says what is in it; see whether memory is free"
            raise QuantkitError(what, hint, UNSUPPORTED) from error
        self._server.handle_metrics()  # waits for the server's loop: without it, ending the server would hang

    def close(self) -> None:
        """Free the model, and end llama.cpp's threads."""
        self._server = None

    def stream(
        self,
        request: dict[str, Any],
        receive: Callable[[Mapping[str, Any]], None],
        stopped: Callable[[], bool] | None = None,
    ) -> None:
        """Send a request; call `receive` with each chunk of the answer until its end or until `stopped()`.

        request: llama.cpp's fields. prompt: a text, or a list of token ids and texts. temperature is 0 by
        default. Raises QuantkitError with llama.cpp's message (exit code 5 if the prompt is too long), and
        the errors of `receive`.
        """
        failed: list[BaseException] = []

        def chunk(received: Mapping[str, Any] | None) -> bool:
            try:
                if received and "error" in received:
                    raise _refusal(received["error"])
                if received:
                    receive(received)
                return stopped is not None and stopped()  # True ends the stream
            except BaseException as error:  # interrupts too: the wheel would print them and go on
                failed.append(error)
                return True

        self._server.handle_completions({"temperature": 0, **request, "stream": True}, chunk)
        if failed:
            raise failed[0]


def _refusal(error: Any) -> QuantkitError:
    error = error if isinstance(error, Mapping) else {"message": error}
    if error.get("type") == TOO_LONG:
        return context_full(error["n_prompt_tokens"], error["n_ctx"])
    return QuantkitError(f"llama.cpp: {error.get('message', error)}")
