"""The tokenizer files of a Hugging Face folder: what they say about special tokens and chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from quantkit.errors import NOT_FOUND, UNSUPPORTED, QuantkitError, first_line
from quantkit.models.files import tokenizing, untrusted
from quantkit.models.files.checkpoint import load_tokenizer
from quantkit.models.files.safetensors_folder import read_json

Json = dict[str, Any]


@dataclass(frozen=True)
class TokenizerFiles:
    """The JSON files of a folder, read when they are needed; an absent one is empty."""

    folder: Path

    @cached_property
    def tokenizer(self) -> Json:
        """Return tokenizer.json as the library reads it, or as transformers makes it of older files
        (vocab.json, merges.txt, tokenizer.model)."""
        return json.loads(self._library.to_str())

    @cached_property
    def _library(self) -> tokenizers.Tokenizer:
        return _load(self.folder)

    def affixes(self) -> tuple[list[int], list[int]]:
        """Return the ids of the tokens that are put before and after every text."""
        self._library.no_padding()
        self._library.no_truncation()
        with tokenizing.explained():
            found = self._library.encode("a")
        inside = [place for place, text in enumerate(found.sequence_ids) if text is not None]
        return (found.ids[: inside[0]], found.ids[inside[-1] + 1 :]) if inside else (found.ids, [])

    @cached_property
    def config(self) -> Json:
        return _read(self.folder / "tokenizer_config.json") or {}

    def added_tokens(self) -> Iterator[tuple[int, Json]]:
        """Return the ids and entries of the tokens that are found in a text before it is cut into words."""
        entries = {entry["id"]: entry for entry in self.tokenizer.get("added_tokens", [])}
        for number, entry in self.config.get("added_tokens_decoder", {}).items():
            entries.setdefault(int(number), entry)
        for content, number in (_read(self.folder / "added_tokens.json") or {}).items():
            entries.setdefault(number, {"content": content, "special": False})
        yield from sorted(entries.items())

    def special(self, role: str) -> Iterator[str | int]:
        """Yield the token of a role ("bos") by text or id, most trusted source first."""
        key = f"{role}_token"
        for source in (self.config, _read(self.folder / "special_tokens_map.json") or {}):
            found = source.get(key)
            found = found.get("content") if isinstance(found, dict) else found
            if isinstance(found, str):
                yield found
        for name in ("generation_config.json", "config.json"):
            yield from self.ids(name, f"{key}_id")

    def ids(self, name: str, key: str) -> list[int]:
        """Return token ids under a key of a configuration file: one, several or none."""
        found = (_read(self.folder / name) or {}).get(key)
        return [k for k in (found if isinstance(found, list) else [found]) if isinstance(k, int)]

    def chat_templates(self) -> dict[str, str]:
        """Return chat templates by name, the unnamed one as "default"; files go before the configuration."""
        path = self.folder / "chat_template.jinja"
        files = {"default": path} if path.is_file() else {}
        files |= {path.stem: path for path in sorted((self.folder / untrusted.TEMPLATES).glob("*.jinja"))}
        if files:
            return {name: untrusted.read(path).decode("utf-8") for name, path in files.items()}
        legacy = _read(self.folder / "chat_template.json") or {}
        stored = self.config.get("chat_template", legacy.get("chat_template"))
        if isinstance(stored, list):
            return {row["name"]: row["template"] for row in stored}
        return {"default": stored} if isinstance(stored, str) else {}


def _load(folder: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of tokenizer.json, or of the older files as transformers reads them."""
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            what = f"{path} is no tokenizer: {first_line(error)}"
            raise QuantkitError(what, "download it again", NOT_FOUND) from error
    found = load_tokenizer(str(folder), folder)
    if not found.is_fast:
        raise QuantkitError(f"{folder}: its tokenizer has no tokenizer.json", "export one", UNSUPPORTED)
    return found.backend_tokenizer


def _read(path: Path) -> Json | None:
    """Return a JSON object; None if there is no such file."""
    return read_json(path) if path.is_file() else None
