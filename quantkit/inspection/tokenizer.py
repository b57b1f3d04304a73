"""The tokenizer of a checkpoint by its files, without building it."""

from __future__ import annotations

import hashlib
from typing import Any

from quantkit.models.files.headers import Contents

SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
GGUF_KINDS = {"gpt2": "BPE", "llama": "SentencePiece", "bert": "WordPiece", "t5": "Unigram"}


def describe(contents: Contents) -> dict[str, Any] | None:
    """Return kind, tokens (the largest id, and one) and sha256 of the chat template; None without a
    tokenizer."""
    found = _of_metadata(contents) if contents.container == "gguf" else _of_files(contents)
    if found is None:
        return None
    kind, tokens, template = found
    sha256 = hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None
    return {"kind": kind, "tokens": tokens, "chat_template_sha256": sha256}


def _of_files(contents: Contents) -> tuple[str, int | None, Any] | None:
    config, whole = contents.json("tokenizer_config.json"), contents.json("tokenizer.json")
    pieces = any(name in contents.files for name in SENTENCEPIECE)
    if config is None and not pieces and "tokenizer.json" not in contents.files:
        return None
    model = (whole or {}).get("model")
    if whole is not None and not isinstance(model, dict):
        contents.problems.append("tokenizer.json holds no tokenizer")
    kind = "SentencePiece" if pieces else (config or {}).get("tokenizer_class", "of unknown kind")
    kind = model.get("type") if isinstance(model, dict) else kind
    data = contents.read("chat_template.jinja")
    template = (config or {}).get("chat_template") if data is None else data.decode("utf-8", "replace")
    return str(kind), _tokens(whole or {}), template


def _tokens(whole: dict[str, Any]) -> int | None:
    """Return the largest id of tokenizer.json, and one."""
    model, added = whole.get("model"), whole.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: list[Any] = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    if isinstance(vocabulary, list):  # Unigram: in order
        ids = [len(vocabulary) - 1]
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return max((value for value in ids if isinstance(value, int)), default=-1) + 1 or None


def _of_metadata(contents: Contents) -> tuple[str, int | None, Any] | None:
    metadata = contents.metadata
    if "tokenizer.ggml.model" not in metadata:
        return None
    model, tokens = str(metadata["tokenizer.ggml.model"]), metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else 0
    return GGUF_KINDS.get(model, model), count or None, metadata.get("tokenizer.chat_template")
