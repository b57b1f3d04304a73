"""From what a user asks for to an engine that answers, and how it chooses tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import NOT_FOUND, UNSUPPORTED, USAGE, QuantkitError
from quantkit.evaluation import generate
from quantkit.evaluation.sampling import Sampling, stored_config
from quantkit.models.files import gguf_file, hub
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine.device import choose_device
from quantkit.serving.chat.through_llamacpp import LlamaCppChat
from quantkit.serving.chat.through_transformers import TransformersChat
from quantkit.serving.chat.turn import Engine
from quantkit.serving.engines.choose import choose_local

CONTEXT = 8192  # tokens, of models that were made for more: memory is taken for all of them
RECOMMENDED = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p"}  # -> general.sampling.* of GGUF


@dataclass(frozen=True)
class Request:
    """What is asked for. engine: auto, transformers or llama.cpp; context: 0 for the model's own; threads: of
    the CPU, 0 for the engine's choice."""

    source: str
    engine: str = "auto"
    context: int = 0
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str | None = None
    decoded: bool = False
    raw: bool = False
    template: Path | None = None
    revision: str | None = None
    offline: bool = False
    trust_remote_code: bool = False
    threads: int = 0

    def check(self) -> None:
        """Raise QuantkitError for what makes no sense."""
        if self.context < 0:
            raise QuantkitError(f"--ctx {self.context} makes no sense", "choose 1 or more", USAGE)
        if self.threads < 0:
            raise QuantkitError(f"--threads {self.threads} makes no sense", "choose 1 or more", USAGE)
        if self.raw and self.template:
            raise QuantkitError("a raw text needs no --template", "leave out one of them", USAGE)


@dataclass(frozen=True)
class Started:
    """An engine, what its maker recommends for choosing tokens, and warnings."""

    engine: Engine
    recommended: Mapping[str, float]
    warnings: tuple[str, ...]


def start(request: Request) -> Started:
    """Load the model. Raises QuantkitError for what does not load, fit, or have a chat template."""
    request.check()
    path = hub.resolve(request.source, request.revision, request.offline)
    template = _read(request.template) if request.template else None
    engine, note = choose_local(request.engine, [] if path.is_file() else [request.source])
    if engine == "llama.cpp":
        return _llamacpp(request, path, template)
    return _transformers(request, template, (f"{note}: weights are decoded",) if note else ())


def _llamacpp(request: Request, path: Path, template: str | None) -> Started:
    if request.decoded or request.dtype != "auto":
        raise QuantkitError(
            "--decoded and --dtype are for transformers: llama.cpp computes with what the file holds",
            "add --engine transformers, or leave them out",
            USAGE,
        )
    metadata, _ = gguf_file.read_header(path)
    made_for = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    context, warnings = _context(request, made_for if isinstance(made_for, int) else None)
    stored = {name: metadata.get(f"general.sampling.{key}") for name, key in RECOMMENDED.items()}
    made = LlamaCppChat(
        request.source,
        path,
        context,
        chat=not request.raw,
        template=template,
        kv_dtype=request.kv_dtype or "float16",
        device=choose_device(request.device).type,
        threads=request.threads,
    )
    return Started(made, _numbers(stored), warnings)


def _transformers(request: Request, template: str | None, notes: tuple[str, ...]) -> Started:
    if request.kv_dtype is not None:
        hint = (
            "leave out --kv-dtype: its cache has the precision of the model (--dtype); GGUF files have both"
        )
        raise QuantkitError("--kv-dtype is for GGUF files through llama.cpp", hint, UNSUPPORTED)
    checkpoint = open_checkpoint(request.source, request.revision, request.offline, request.trust_remote_code)
    context, warnings = _context(request, checkpoint.context)
    warnings += notes
    device = choose_device(request.device)
    if request.threads:
        torch.set_num_threads(request.threads)
    if not request.raw and template is None and not checkpoint.tokenizer.chat_template:
        raise QuantkitError(
            f"{request.source} has no chat template",
            "give one with --template FILE, or let it go on from text with --raw",
            USAGE,
        )
    made = TransformersChat(
        checkpoint,
        generate.shared_dtype(request.dtype, checkpoint, device),
        device,
        context,
        decoded=request.decoded,
        template=template,
    )
    stored = stored_config(checkpoint)
    told = {name: getattr(stored, name, None) for name in RECOMMENDED} if stored and stored.do_sample else {}
    return Started(made, _numbers(told), warnings)


def _context(request: Request, made_for: int | None) -> tuple[int, tuple[str, ...]]:
    """Tokens of the conversation at most, and a warning where the model was made for fewer."""
    context = request.context or min(made_for or CONTEXT, CONTEXT)
    if made_for is not None and context > made_for:
        return context, (f"{request.source} was made for {made_for:,} tokens, --ctx is {context:,}",)
    return context, ()


def _numbers(stored: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in stored.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QuantkitError(
            f"--template {path} cannot be read: {error}", "check the path", NOT_FOUND
        ) from error


def sampling(recommended: Mapping[str, float], tokens: int, seed: int, **asked: float | None) -> Sampling:
    """What is asked, the rest as recommended; at temperature 0 nothing that is recommended cuts.

    Raises QuantkitError for values that make no sense.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    found = {**recommended, **given}
    if not found.get("temperature"):
        found = given
    if "top_k" in found:
        found["top_k"] = int(found["top_k"])
    made = Sampling(tokens=tokens, seed=seed, **found)
    made.check()
    return made
