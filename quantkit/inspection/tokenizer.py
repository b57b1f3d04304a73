"""What the tokenizer's files say, without building it."""

from __future__ import annotations

import hashlib
from typing import Any

from quantkit.models.files.headers import Contents

SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
SPECIAL = ("bos", "eos", "pad", "unk")
GGUF_KINDS = {"gpt2": "BPE", "llama": "SentencePiece", "bert": "WordPiece", "t5": "Unigram"}


def describe(contents: Contents) -> dict[str, Any] | None:
    """kind, tokens (the largest id, and one), special tokens, limit and chat template; None without one."""
    found = _of_metadata(contents) if contents.container == "gguf" else _of_files(contents)
    return None if found is None else found | {"chat_template": _hashed(found["chat_template"])}


def _of_files(contents: Contents) -> dict[str, Any] | None:
    config = contents.json("tokenizer_config.json") or {}
    whole = contents.json("tokenizer.json")
    pieces = next((name for name in SENTENCEPIECE if name in contents.files), None)
    if not config and whole is None and pieces is None and "tokenizer.json" not in contents.files:
        return None
    model = (whole or {}).get("model")
    if whole is not None and not isinstance(model, dict):
        contents.problems.append("tokenizer.json holds no tokenizer")
    kind = str(model.get("type")) if isinstance(model, dict) else "SentencePiece" if pieces else None
    return {
        "kind": kind,
        "class": config.get("tokenizer_class"),
        "tokens": _tokens(whole) if whole else None,
        "special": {name: _text(config.get(f"{name}_token")) for name in SPECIAL},
        "limit": config.get("model_max_length"),
        "chat_template": _template(contents, config),
    }


def _tokens(whole: dict[str, Any]) -> int | None:
    """The largest id of tokenizer.json, and one."""
    model, added = whole.get("model"), whole.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: list[Any] = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    if isinstance(vocabulary, list):  # Unigram: in order
        ids = [len(vocabulary) - 1]
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return max((value for value in ids if isinstance(value, int)), default=-1) + 1 or None


def _template(contents: Contents, config: dict[str, Any]) -> str | None:
    data = contents.read("chat_template.jinja")
    if data is not None:
        return data.decode("utf-8", "replace")
    stored = config.get("chat_template")
    if isinstance(stored, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, dict)}
        stored = named.get("default") or next(iter(named.values()), None)
    return stored if isinstance(stored, str) else None


def _text(token: Any) -> str | None:
    """A special token, spelled out or as the mapping that older files hold."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _of_metadata(contents: Contents) -> dict[str, Any] | None:
    told = contents.metadata
    if "tokenizer.ggml.model" not in told:
        return None
    tokens = told.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {name: told.get(f"tokenizer.ggml.{words}_token_id") for name, words in names.items()}
    special = {
        name: tokens[place] if isinstance(place, int) and 0 <= place < len(tokens) else None
        for name, place in ids.items()
    }
    template = told.get("tokenizer.chat_template")
    model = str(told["tokenizer.ggml.model"])
    return {
        "kind": GGUF_KINDS.get(model, model),
        "class": told.get("tokenizer.ggml.pre"),
        "tokens": len(tokens) or None,
        "special": special,
        "limit": None,
        "chat_template": template if isinstance(template, str) else None,
    }


def _hashed(template: str | None) -> dict[str, Any] | None:
    if template is None:
        return None
    return {"characters": len(template), "sha256": hashlib.sha256(template.encode()).hexdigest()}
