"""All metadata of a GGUF file: general keys, the architecture's and the tokenizer's.

How llama.cpp uses the tokenizer's keys: `src/llama-vocab.cpp`; their meaning:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. tokenizer.py is the inverse.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_VERSION
from gguf.utility import model_weight_count_rounded_notation

from quantkit.errors import USAGE, QuantkitError, name_all
from quantkit.models.files import card
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.gguf import configuration, file_types, token_models
from quantkit.models.gguf.checkpoint import GgufCheckpoint
from quantkit.models.gguf.pre_tokenizers import is_byte_level
from quantkit.models.gguf.tensors import Target
from quantkit.models.gguf.token_models import ROLES, SPACE, Kind, Token, TokenizerFiles, Vocabulary, Warn

PHI3_TOKENS = {"<s>", "<unk>", "<|endoftext|>"}  # llama.cpp demands them of a model that is named phi-3
TOKEN_TYPE = "tokenizer.ggml.token_type"
DEFAULT_EOS = {"gpt2": 11, "llama": 2}
ADDED_SCORE, UNUSED_SCORE = -1000.0, -10000.0
ENDS = frozenset(  # texts of tokens at which llama.cpp stops
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> "
    "<|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> "
    "<｜end▁of▁sentence｜>".split()
)


def assemble(
    checkpoint: Checkpoint, targets: Iterable[Target], file_type: str | None, tokenizer: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all keys and values in the order of writing.

    file_type: llama-quantize's name, such as "Q4_K_M" or "F16", or None. tokenizer: the keys from
    `tokenizer`. Raises QuantkitError as `configuration.to_metadata` does.
    """
    keys = configuration.to_metadata(checkpoint.text_config)
    weights = sum(math.prod(target.shape) for target in targets if target.values is None)
    general = {
        "general.architecture": keys.pop("general.architecture"),
        "general.type": "model",
        "general.name": _name(checkpoint.name, tokenizer.get("tokenizer.ggml.tokens", ())),
        "general.size_label": model_weight_count_rounded_notation(weights),
    }
    kind = {  # last, as in llama-quantize, so that files can be compared byte by byte
        "general.quantization_version": GGML_QUANT_VERSION,
        "general.file_type": file_type and file_types.number(file_type),
    }
    metadata = general | _origin(checkpoint) | keys | dict(tokenizer) | kind
    return {key: value for key, value in metadata.items() if value is not None}


def tokenizer(checkpoint: Checkpoint, size: int, pre: str | None, warn: Warn) -> dict[str, Any]:
    """Return the keys that begin with `tokenizer.`. For a folder see `of_folder`; those of a GGUF file are
    copied, except `pre` if given."""
    if not isinstance(checkpoint, GgufCheckpoint):
        return of_folder(checkpoint.folder, size, pre, warn)
    keys = {key: value for key, value in checkpoint.metadata.items() if key.startswith("tokenizer.")}
    if (types := keys.get(TOKEN_TYPE)) is not None:
        keys[TOKEN_TYPE] = np.array(types, np.int32)  # llama.cpp reads int32
    return keys | ({"tokenizer.ggml.pre": pre} if pre else {})


def _name(name: str, tokens: Iterable[str]) -> str:
    """Return the model's name, changed if llama.cpp would mistake the model for Phi-3."""
    if re.search("phi-?3", name, re.IGNORECASE) and not set(tokens) >= PHI3_TOKENS:
        name = re.sub("(phi)-?3", r"\1_3", name, flags=re.IGNORECASE)
    return name


def _origin(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return licence and languages that the original's card declares, and its hub id if it is known."""
    head = card.inherited(checkpoint.folder)
    languages = head.get("language")
    keys = {
        "general.quantized_by": "quantkit",
        "general.license": head.get("license"),
        "general.license.name": head.get("license_name"),
        "general.license.link": head.get("license_link"),
        "general.languages": [languages] if isinstance(languages, str) else languages,
    }
    if base := card.base_of(checkpoint.source, checkpoint.folder):
        owner, _, name = base.partition("/")
        keys |= {"general.base_model.count": 1, "general.base_model.0.name": name}
        keys["general.base_model.0.organization"] = owner
        keys["general.base_model.0.repo_url"] = f"https://huggingface.co/{base}"
    return keys


# ---- the tokenizer of a Hugging Face folder


def of_folder(
    folder: Path, vocab_size: int, pre: str | None = None, warn: Warn = lambda message: None
) -> dict[str, Any]:
    """Return the metadata that describes the tokenizer of `folder` to llama.cpp.

    vocab_size: rows of the embedding, to which the vocabulary is padded or cut. pre: llama.cpp's name of the
    pre-tokenizer; None: detected. warn: called with messages about what llama.cpp does differently. Raises
    QuantkitError if llama.cpp cannot represent the tokenizer.
    """
    try:
        return _metadata(TokenizerFiles(folder), vocab_size, pre, warn)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"{folder}: the tokenizer is damaged: {error!r:.100}"
        raise QuantkitError(what, "download the tokenizer's files again") from error


def _metadata(files: TokenizerFiles, vocab_size: int, pre: str | None, warn: Warn) -> dict[str, Any]:
    if is_byte_level(files.tokenizer["pre_tokenizer"]):
        keys, tokens = token_models.byte_level(files, vocab_size, pre, warn)
    elif pre is not None:
        raise QuantkitError(f"--pre-tokenizer {pre} is for byte-level BPE only", "leave it out", USAGE)
    else:
        keys, tokens = token_models.sentencepiece(files, warn)
    _add(tokens, files, warn)
    table = _table(tokens, vocab_size, warn)
    if keys["model"] == "llama":
        table = [  # llama.cpp finds user-defined tokens in the text before its spaces are replaced
            token._replace(text=token.text.replace(SPACE, " ")) if token.type == Kind.USER_DEFINED else token
            for token in table
        ]
        keys["scores"] = np.array([token.score for token in table], np.float32)
    keys["tokens"] = [token.text for token in table]
    keys["token_type"] = np.array([token.type for token in table], np.int32)
    keys |= _special_tokens(files, tokens, keys["model"], vocab_size, warn)
    templates = files.chat_templates()
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    if "default" in templates:
        metadata["tokenizer.chat_template"] = templates.pop("default")
    if templates:
        metadata["tokenizer.chat_templates"] = sorted(templates)
        metadata |= {f"tokenizer.chat_template.{name}": text for name, text in sorted(templates.items())}
    return metadata


def _add(tokens: Vocabulary, files: TokenizerFiles, warn: Warn) -> None:
    """Insert added tokens by id. If a model's token has the same text, the added token replaces it."""
    numbers = {token.text: number for number, token in tokens.items()}
    stripping = []
    for number, entry in files.added_tokens():
        text = entry["content"]
        old = tokens.pop(numbers.get(text, number), Token(text))
        kind = Kind.CONTROL if entry.get("special") else Kind.USER_DEFINED
        tokens[number] = Token(text, Kind.UNKNOWN if old.type == Kind.UNKNOWN else kind, ADDED_SCORE)
        if any(entry.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
            stripping.append(text)
    if stripping:
        warn(f"llama.cpp keeps the spaces next to {name_all(stripping)}, which this tokenizer drops")


def _table(tokens: Vocabulary, vocab_size: int, warn: Warn) -> list[Token]:
    """Return one token for every row of the embedding."""
    beyond = [token.text for number, token in sorted(tokens.items()) if number >= vocab_size]
    if beyond:
        warn(f"tokens beyond the embedding's {vocab_size} rows are left out: {name_all(beyond)}")
    taken = {token.text for token in tokens.values()}
    table = []
    for number in range(vocab_size):
        padding = f"[PAD{number}]"
        while padding in taken:
            padding += "_"
        table.append(tokens.get(number) or Token(padding, Kind.UNUSED, UNUSED_SCORE))
    return table


def _special_tokens(
    files: TokenizerFiles, tokens: Vocabulary, model: str, vocab_size: int, warn: Warn
) -> dict[str, int | bool]:
    """Return the ids of special tokens, and whether BOS and EOS are added to a text."""
    numbers = {token.text: number for number, token in tokens.items()}
    ids: dict[str, int] = {}
    for role in ROLES:
        for value in files.special(role):
            number = numbers.get(value, value)
            if isinstance(number, int) and 0 <= number < vocab_size:
                ids.setdefault(role, number)
    adds = {}
    for role, affixes in zip(("bos", "eos"), files.affixes(), strict=True):
        if len(affixes) == 1:
            ids.setdefault(role, affixes[0])
        adds[f"add_{role}_token"] = bool(affixes) and affixes == [ids.get(role)]
        if affixes and not adds[f"add_{role}_token"]:
            names = name_all(tokens[number].text for number in affixes if number in tokens)
            warn(f"llama.cpp will not put {names} {'before' if role == 'bos' else 'after'} a text")
    ends = [id for id in files.ids("generation_config.json", "eos_token_id") if 0 <= id < vocab_size]
    for number in (*ends, *ids.values()):
        ids.setdefault("eos", number)
    if "eos" not in ids:
        warn(f"llama.cpp will stop at token {DEFAULT_EOS[model]}, as no token ends a text")
    unnamed = [k for k in ends if k != ids.get("eos") and k in tokens and tokens[k].text not in ENDS]
    extra = dict(zip(("eot", "eom"), unnamed, strict=False))
    if len(unnamed) > len(extra):
        warn(f"llama.cpp will not stop at {name_all(tokens[k].text for k in unnamed[2:])}")
    names = ROLES | {role: role for role in extra}
    return {f"{names[role]}_token_id": number for role, number in (ids | extra).items()} | adds
