"""The tokenizer in a GGUF file's metadata, converted for transformers: the inverse of metadata.py.

Files of other tools are read too. Missing keys have llama.cpp's defaults, but text is normalized to NFC if
the models of that pre-tokenizer do so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantkit.errors import UNSUPPORTED, QuantkitError, first_line, require
from quantkit.models.gguf import pre_tokenizers
from quantkit.models.gguf.token_models import COLLAPSE, ROLES, SPACE, Kind, Merge, from_scores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Json = dict[str, Any]
Tokens = dict[int, tuple[str, int]]  # id -> text and type
Special = dict[str, tuple[int, str]]  # role -> id and text
ADDED = (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)  # found before a text is split into words
DEFAULT_IDS = {"bos": 1, "eos": 2, "unk": 0}  # llama.cpp's defaults for SentencePiece
PREFIX = "tokenizer.ggml."
MAX_TOKEN_CHARS = 1024  # limit for merged tokens: finding their halves is quadratic


def from_metadata(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Return the tokenizer that `tokenizer.*` keys describe, without padding tokens.

    Raises QuantkitError if the metadata is damaged or of an unsupported kind.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    keys = _keys(metadata)
    kind = keys.get("model")
    what = f"the file's tokenizer is of kind {kind!r}"
    require(kind in ("gpt2", "llama"), what, "quantkit reads 'gpt2' and 'llama'", UNSUPPORTED)
    try:
        tokens = _tokens(keys)
        special = _special(keys, {number: text for number, (text, _) in tokens.items()})
        stored, adds_bos = (
            _byte_level(keys, tokens) if kind == "gpt2" else _sentencepiece(keys, tokens, special)
        )
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        stored["added_tokens"] = [
            {"id": number, "content": text, "special": bool(kind != Kind.USER_DEFINED)} | flags
            for number, (text, kind) in tokens.items()
            if kind in ADDED
        ]
        stored["post_processor"] = _post_processor(keys, special, adds_bos)
        tokenizer = Tokenizer.from_str(json.dumps(stored))
    except QuantkitError:
        raise
    except Exception as error:  # absent or unsuitable values raise many types
        raise _damaged(f"{type(error).__name__}: {first_line(error)}") from error
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=_templates(metadata),
        **{f"{role}_token": text for role, (_, text) in special.items()},
    )


def _templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template; if there are several, all by name."""
    default = metadata.get("tokenizer.chat_template")
    names = metadata.get("tokenizer.chat_templates", [])
    names = names if isinstance(names, list) else [names]
    for name in names:
        if not (isinstance(name, str) and re.fullmatch(r"\w[\w.-]*", name)):  # the name becomes a file's
            raise _damaged(f"a chat template is named {name!r:.80}")
    named = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    templates = {name: text for name, text in ({"default": default} | named).items() if isinstance(text, str)}
    return templates if set(templates) - {"default"} else templates.get("default")


def special_tokens(metadata: Mapping[str, Any]) -> Special:
    """Return id and text of every special token that a chat template may name, by role.

    Raises QuantkitError if the metadata is damaged.
    """
    keys = _keys(metadata)
    if not isinstance(keys.get("tokens"), list):
        raise _damaged("its tokens are absent")
    return _special(keys, dict(enumerate(keys["tokens"])))


def _keys(metadata: Mapping[str, Any]) -> Json:
    """Return the entries of `tokenizer.ggml.*`, keyed without this prefix."""
    return {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}


def _byte_level(keys: Json, tokens: Tokens) -> tuple[Json, bool]:
    pre = str(keys.get("pre", "default"))
    row = pre_tokenizers.BY_NAME.get(pre)
    hint = f"quantkit knows {', '.join(sorted(pre_tokenizers.BY_NAME))}"
    require(row, f"the file's pre-tokenizer {pre!r} is unknown", hint, UNSUPPORTED)
    model = _model(tokens, [_halves(merge) for merge in keys["merges"]])
    model["ignore_merges"] = row.ignore_merges
    parts = {"normalizer": {"type": "NFC"} if row.nfc else None, "pre_tokenizer": row.pre_tokenizer}
    return parts | {"model": model, "decoder": pre_tokenizers.WORDS}, row.add_bos


def _halves(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)  # a token may begin with a space
    if cut < 0:
        raise _damaged(f"{merge!r:.40} is no merge of two tokens")
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(keys: Json, tokens: Tokens, special: Special) -> tuple[Json, bool]:
    scores = keys["scores"]
    merged = {text: scores[k] for k, (text, kind) in tokens.items() if kind == Kind.NORMAL}
    if any(len(text) > MAX_TOKEN_CHARS for text in merged):
        raise _damaged(f"a token has more than {MAX_TOKEN_CHARS} characters")
    model = _model(tokens, from_scores(merged, merged))
    model |= {"byte_fallback": True, "fuse_unk": True, "unk_token": special.get("unk", (0, None))[1]}
    steps: list[Json] = []
    if keys.get("remove_extra_whitespaces"):
        steps += [_replace({"Regex": pattern}, kept) for pattern, kept in COLLAPSE.items()]
    prefix = bool(keys.get("add_space_prefix", True))
    steps += [{"type": "Prepend", "prepend": SPACE}] * prefix
    steps += [_replace({"String": " "}, SPACE)]
    decoders = [_replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    parts = {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None, "model": model}
    return parts | {"decoder": {"type": "Sequence", "decoders": decoders}}, True


def _replace(pattern: Json, content: str) -> Json:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _model(tokens: Tokens, merges: list[Merge]) -> Json:
    return {"type": "BPE", "vocab": {text: k for k, (text, _) in tokens.items()}, "merges": merges}


def _tokens(keys: Json) -> Tokens:
    """Return all tokens except padding. Raises QuantkitError if a text has two ids."""
    texts = keys["tokens"]
    types = list(keys.get("token_type", [Kind.NORMAL] * len(texts)))
    if len(types) != len(texts) or not all(isinstance(text, str) for text in texts):
        raise _damaged("its tokens are no texts, or not as many as their types")
    padding = {k for k, kind in enumerate(types) if kind == Kind.UNUSED and texts[k].startswith(f"[PAD{k}]")}
    tokens = {k: (text, types[k]) for k, text in enumerate(texts) if k not in padding}
    if len({text for text, _ in tokens.values()}) < len(tokens):
        raise _damaged("a token has two ids")
    return tokens


def _special(keys: Json, texts: Mapping[int, str]) -> Special:
    """Return special tokens by role. Ids outside the vocabulary are ignored, as in llama.cpp."""
    defaults = DEFAULT_IDS if keys.get("model") == "llama" else {}
    ids = {role: keys.get(f"{name}_token_id", defaults.get(role)) for role, name in ROLES.items()}
    return {role: (id, texts[id]) for role, id in ids.items() if isinstance(id, int) and id in texts}


def _post_processor(keys: Json, special: Special, adds_bos: bool) -> Json:
    """Return the step that puts BOS and EOS around a text if the file says so."""
    before, after = [], []
    for role, affix, default in (("bos", before, adds_bos), ("eos", after, False)):
        if keys.get(f"add_{role}_token", default):
            if role not in special:
                raise _damaged(f"it adds {role} to texts and does not say what that is")
            affix.append(special[role])
    single, pair = (
        [_item("SpecialToken", text) for _, text in before]
        + [_item("Sequence", name) for name in names]
        + [_item("SpecialToken", text) for _, text in after]
        for names in ("A", "AB")
    )
    tokens = {text: {"id": text, "ids": [number], "tokens": [text]} for number, text in before + after}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def _item(kind: str, name: str) -> Json:
    return {kind: {"id": name, "type_id": 0}}


def _damaged(reason: str) -> QuantkitError:
    return QuantkitError(f"the tokenizer in the file is damaged: {reason}", "download or export it again")
