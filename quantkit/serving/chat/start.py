"""Start of a conversation: chooses and loads the engine, determines the sampling settings."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantkit.errors import UNSUPPORTED, USAGE, require
from quantkit.evaluation.sampling import Sampling, stored_config
from quantkit.models.files import gguf_file, hub
from quantkit.models.files.open import open_checkpoint
from quantkit.quantize.progress import SILENT, Progress
from quantkit.serving.chat.llamacpp import LlamaCppChat
from quantkit.serving.chat.session import ChatSession
from quantkit.serving.chat.settings import ChatSettings
from quantkit.serving.chat.transformers import TransformersChat
from quantkit.serving.engines import llamacpp
from quantkit.serving.engines.choose import choose_local
from quantkit.text.sources import opened

CONTEXT = 8192  # default maximum: llama.cpp allocates memory for all tokens
RECOMMENDED = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p"}  # names in GGUF: general.sampling.*


def start(
    source: str,
    settings: ChatSettings,
    revision: str | None = None,
    offline: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> ChatSession:
    """Load the model and return the session. Raises QuantkitError for invalid settings, and if the model does
    not load, does not fit the memory, or has no chat template."""
    settings.check()
    # invalid flags fail before a download; whether the model recommends sampling is not known yet
    chosen_sampling(replace(settings, temperature=settings.temperature or 1.0), {})
    progress.phase(f"loading {source}")
    path = hub.resolve(source, revision, offline)
    engine, note = choose_local(settings.engine, None if path.is_file() else source, settings.decoded)
    if engine == "llama.cpp":
        why = "--decoded and --dtype are for transformers: llama.cpp computes in the types of the file"
        hint = "add --engine transformers, or leave them out"
        require(not settings.decoded and settings.dtype == "auto", why, hint, USAGE)
        metadata, _ = gguf_file.read_header(path)
        stored = llamacpp.stored_template(metadata)
        made_for = metadata.get(f"{metadata.get('general.architecture')}.context_length")
        made_for = made_for if isinstance(made_for, int) else None
        recommended = {name: metadata.get(f"general.sampling.{key}") for name, key in RECOMMENDED.items()}
    else:
        hint = "leave out --kv-dtype: the cache has the precision of --dtype"
        require(not settings.kv_dtype, "--kv-dtype is for GGUF files through llama.cpp", hint, UNSUPPORTED)
        checkpoint = open_checkpoint(source, revision, offline, trust_remote_code)
        stored, made_for = checkpoint.tokenizer.chat_template, checkpoint.context
        if note:
            progress.warn(f"{note}: weights are decoded")
        config = stored_config(checkpoint)
        config = config if config and config.do_sample else None
        recommended = {name: getattr(config, name, None) for name in RECOMMENDED}
    given = None
    if settings.template:
        with opened(settings.template, "--template", "check the path") as file:
            given = file.read()
        require(given.strip(), f"{settings.template} is empty", "give a Jinja template", USAGE)
    hint = "add --template FILE, or --raw to continue text without roles"
    require(settings.raw or given or stored, f"{source} has no chat template", hint, USAGE)
    sampling = chosen_sampling(settings, recommended)
    context = settings.ctx or min(made_for or CONTEXT, CONTEXT)
    if made_for is not None and context > made_for:
        progress.warn(f"{source} was made for {made_for:,} tokens, --ctx is {context:,}")
    if engine == "llama.cpp":
        chat: Any = LlamaCppChat(source, path, settings, context, given)
    else:
        chat = TransformersChat(checkpoint, settings, context, given)
    return ChatSession(chat, sampling, settings.system, settings.raw)


def chosen_sampling(settings: ChatSettings, recommended: Mapping[str, Any]) -> Sampling:
    """Return the sampling settings: flags first, then `recommended`, which temperature 0 switches off.

    Values of `recommended` that are no finite numbers are ignored. Raises QuantkitError for invalid values.
    """
    flags = {name: getattr(settings, name) for name in RECOMMENDED if getattr(settings, name) is not None}
    numbers = {name: value for name, value in recommended.items() if type(value) in (int, float)}
    chosen = {name: value for name, value in numbers.items() if abs(value) < math.inf} | flags
    if not chosen.get("temperature"):
        chosen = flags
    if "top_k" in chosen:
        chosen["top_k"] = int(chosen["top_k"])
    sampling = Sampling(tokens=settings.tokens, seed=settings.seed, **chosen)
    sampling.check()
    return sampling
