"""The tokenizer in a GGUF file's metadata, as transformers runs it: what vocabulary.py undoes.

Also for files of other tools. What is not in a file is taken as llama.cpp takes it, but text is normalized
to NFC where the models of that name do so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantkit.errors import UNSUPPORTED, QuantkitError, first_line
from quantkit.models.gguf import pre_tokenizers
from quantkit.models.gguf.token_models import (
    COLLAPSE,
    CONTROL,
    NORMAL,
    ROLES,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Merge,
    from_scores,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Json = dict[str, Any]
Tokens = dict[int, tuple[str, int]]  # id -> text and type
Special = dict[str, tuple[int, str]]  # role -> id and text
ADDED = (UNKNOWN, CONTROL, USER_DEFINED)  # types of tokens that are looked for before a text is cut
DEFAULT_IDS = {"bos": 1, "eos": 2, "unk": 0}  # of SentencePiece: what llama.cpp takes for granted
MAX_TOKEN_CHARS = 1024  # of a token that is merged: halving is quadratic


def from_metadata(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that `tokenizer.*` keys describe. Padding up to the embedding's rows is left out.

    Raises QuantkitError for metadata that is damaged, or of a kind that is not read.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    keys = _Keys(metadata)
    kind = keys.get("model", str)
    if kind not in BUILDERS:
        raise QuantkitError(
            f"the file's tokenizer is of kind {kind!r}",
            hint=f"quantkit reads {' and '.join(map(repr, BUILDERS))}",
            exit_code=UNSUPPORTED,
        )
    tokens = _tokens(keys)
    special = _special(keys, tokens, DEFAULT_IDS if kind == "llama" else {})
    stored, adds_bos = BUILDERS[kind](keys, tokens, special)
    stored["added_tokens"] = [_added(k, *token) for k, token in tokens.items() if token[1] in ADDED]
    stored["post_processor"] = _post_processor(keys, special, adds_bos)
    try:
        tokenizer = Tokenizer.from_str(json.dumps(stored))
    except Exception as error:  # the library raises nothing more precise
        raise _damaged(first_line(error)) from error
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=_templates(metadata),
        **{f"{role}_token": text for role, (_, text) in special.items()},
    )


def special_tokens(metadata: Mapping[str, Any]) -> Special:
    """Return the id and the text of every special token that a template may name, by role.

    Raises QuantkitError for metadata that is damaged.
    """
    keys = _Keys(metadata)
    tokens = {number: (text, NORMAL) for number, text in enumerate(keys.strings("tokens"))}
    return _special(keys, tokens, DEFAULT_IDS if keys.get("model", str) == "llama" else {})


def _byte_level(keys: _Keys, tokens: Tokens, special: Special) -> tuple[Json, bool]:
    pre = keys.get("pre", str, "default")
    row = pre_tokenizers.by_name().get(pre)
    if row is None:
        raise QuantkitError(
            f"the file's pre-tokenizer, {pre!r}, is none that quantkit knows",
            hint=f"it knows {', '.join(sorted(pre_tokenizers.by_name()))}",
            exit_code=UNSUPPORTED,
        )
    model = _model(tokens, [_halves(merge) for merge in keys.strings("merges")]) | {
        "ignore_merges": row.ignore_merges
    }
    parts = {"normalizer": row.normalizer, "pre_tokenizer": row.pre_tokenizer, "model": model}
    return parts | {"decoder": pre_tokenizers.WORDS}, row.add_bos


def _halves(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)  # a token may begin with a space
    if cut < 0:
        raise _damaged(f"{merge!r:.40} is no merge of two tokens")
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(keys: _Keys, tokens: Tokens, special: Special) -> tuple[Json, bool]:
    scores = keys.numbers("scores", len(keys.get("tokens", list)))
    merged = {text: scores[k] for k, (text, kind) in tokens.items() if kind == NORMAL}
    if any(len(text) > MAX_TOKEN_CHARS for text in merged):
        raise _damaged(f"a token has more than {MAX_TOKEN_CHARS} characters")
    model = _model(tokens, from_scores(merged, merged))
    model |= {"byte_fallback": True, "fuse_unk": True, "unk_token": special.get("unk", (0, None))[1]}
    steps: list[Json] = []
    if keys.get("remove_extra_whitespaces", bool, False):
        steps += [_replace({"Regex": pattern}, kept) for pattern, kept in COLLAPSE.items()]
    prefix = keys.get("add_space_prefix", bool, True)
    steps += [{"type": "Prepend", "prepend": SPACE}] * prefix
    steps += [_replace({"String": " "}, SPACE)]
    decoders = [_replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    parts = {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None, "model": model}
    return parts | {"decoder": {"type": "Sequence", "decoders": decoders}}, True


def _replace(pattern: Json, content: str) -> Json:
    return {"type": "Replace", "pattern": pattern, "content": content}


BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}  # tokenizer.ggml.model -> its parts


def _model(tokens: Tokens, merges: list[Merge]) -> Json:
    return {"type": "BPE", "vocab": {text: k for k, (text, _) in tokens.items()}, "merges": merges}


def _tokens(keys: _Keys) -> Tokens:
    """All tokens but padding. Raises QuantkitError where a text has two ids."""
    texts = keys.strings("tokens")
    types = keys.numbers("token_type", len(texts), default=[NORMAL] * len(texts))
    padding = {k for k, kind in enumerate(types) if kind == UNUSED and texts[k].startswith(f"[PAD{k}]")}
    tokens = {k: (text, types[k]) for k, text in enumerate(texts) if k not in padding}
    if len({text for text, _ in tokens.values()}) < len(tokens):
        raise _damaged("a token has two ids")
    return tokens


def _special(keys: _Keys, tokens: Tokens, defaults: dict[str, int]) -> Special:
    found = {}
    for role, name in ROLES.items():
        number = keys.get(f"{name}_token_id", int, defaults.get(role))
        if number in tokens:  # llama.cpp, too, passes over ids that no token has
            found[role] = number, tokens[number][0]
    return found


def _added(number: int, text: str, kind: int) -> Json:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": kind != USER_DEFINED} | flags


def _post_processor(keys: _Keys, special: Special, adds_bos: bool) -> Json:
    """What puts BOS and EOS around a text where the file says so."""
    before, after = [], []
    for role, place, default in (("bos", before, adds_bos), ("eos", after, False)):
        if keys.get(f"add_{role}_token", bool, default):
            if role not in special:
                raise _damaged(f"it adds {role} to texts and does not say what that is")
            place.append(special[role])
    single, pair = (
        [_item("SpecialToken", text) for _, text in before]
        + [_item("Sequence", name) for name in names]
        + [_item("SpecialToken", text) for _, text in after]
        for names in ("A", "AB")
    )
    known = {text: {"id": text, "ids": [number], "tokens": [text]} for number, text in before + after}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}


def _item(kind: str, name: str) -> Json:
    return {kind: {"id": name, "type_id": 0}}


def _templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    default = metadata.get("tokenizer.chat_template")
    names = metadata.get("tokenizer.chat_templates", [])
    for name in names if isinstance(names, list) else [names]:
        if not (isinstance(name, str) and re.fullmatch(r"\w[\w.-]*", name)):  # each becomes a file
            raise _damaged(f"a chat template is named {name!r:.80}")
    named = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    found = {name: text for name, text in ({"default": default} | named).items() if isinstance(text, str)}
    return found if set(found) - {"default"} else found.get("default")


class _Keys:
    """`tokenizer.ggml.*`, each of the type it must have."""

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        """The value of a key. Raises QuantkitError when it is absent without a default, or another type."""
        key = f"tokenizer.ggml.{key}"
        value = self._metadata.get(key, default)
        if value is ...:
            raise _damaged(f"{key} is absent")
        value = value.tolist() if hasattr(value, "tolist") else value
        if value is not default and type(value) is not kind:
            raise _damaged(f"{key} is {value!r:.40}, no {kind.__name__}")
        return value

    def strings(self, key: str) -> list[str]:
        found = self.get(key, list)
        if not all(isinstance(text, str) for text in found):
            raise _damaged(f"{key} is no list of texts")
        return found

    def numbers(self, key: str, count: int, default: Any = ...) -> list[float]:
        """One number for each of `count` tokens."""
        found = self.get(key, list, default)
        if len(found) != count or not all(isinstance(number, int | float) for number in found):
            raise _damaged(f"{key} is no list of {count} numbers, one for a token")
        return found


def _damaged(reason: str) -> QuantkitError:
    return QuantkitError(f"the tokenizer in the file is damaged: {reason}", "download or export it again")
