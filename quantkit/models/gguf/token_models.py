"""The two kinds of BPE that llama.cpp runs, converted from a Hugging Face folder.

llama.cpp calls byte-level BPE "gpt2": merges and a named pre-tokenizer. It calls SentencePiece's BPE "llama":
a score per token instead of merges. A feature that llama.cpp lacks is an error if it changes ordinary text,
else a message to `warn`.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from quantkit.errors import NOT_FOUND, UNSUPPORTED, QuantkitError, first_line, name_all, one_of, require
from quantkit.models.files import tokenizing, untrusted
from quantkit.models.files.checkpoint import load_tokenizer
from quantkit.models.files.safetensors_folder import read_json
from quantkit.models.gguf import pre_tokenizers
from quantkit.models.gguf.pre_tokenizers import Json, PreTokenizer, flat

Kind = IntEnum("Kind", "NORMAL UNKNOWN CONTROL USER_DEFINED UNUSED BYTE")  # gguf.TokenType without its import
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # role -> its name in the keys
SPACE = "▁"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
FORMS = ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled")  # normalizers that leave most text alone
COLLAPSE = {" {2,}": " ", r"\A +| +\z": ""}  # `remove_extra_whitespaces` of SentencePiece, as patterns
Warn = Callable[[str], None]
Merge = tuple[str, str]


class Token(NamedTuple):
    text: str
    type: int = Kind.NORMAL
    score: float = 0.0


Vocabulary = dict[int, Token]  # by id; ids may be missing
NAMES = ", ".join(row.names[0] for row in pre_tokenizers.ROWS)


@dataclass(frozen=True)
class TokenizerFiles:
    """The JSON files of a tokenizer's folder, read on first use; an absent file is empty."""

    folder: Path

    @cached_property
    def tokenizer(self) -> Json:
        """Return tokenizer.json as the tokenizers library reads it; transformers converts older files
        (vocab.json, merges.txt, tokenizer.model)."""
        return json.loads(self._library.to_str())

    @cached_property
    def _library(self) -> tokenizers.Tokenizer:
        path = self.folder / "tokenizer.json"
        if path.is_file():
            try:
                return tokenizers.Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises nothing more precise
                what = f"{path} is no tokenizer: {first_line(error)}"
                raise QuantkitError(what, "download it again", NOT_FOUND) from error
        tokenizer = load_tokenizer(str(self.folder), self.folder)
        what = f"{self.folder}: its tokenizer has no tokenizer.json"
        require(tokenizer.is_fast, what, "save one", UNSUPPORTED)
        return tokenizer.backend_tokenizer

    def affixes(self) -> tuple[list[int], list[int]]:
        """Return the ids of the tokens that the tokenizer adds before and after every text."""
        self._library.no_padding()
        self._library.no_truncation()
        with tokenizing.explained():
            encoding = self._library.encode("a")
        inside = [index for index, text in enumerate(encoding.sequence_ids) if text is not None]
        return (encoding.ids[: inside[0]], encoding.ids[inside[-1] + 1 :]) if inside else (encoding.ids, [])

    @cached_property
    def config(self) -> Json:
        return _read(self.folder / "tokenizer_config.json") or {}

    def added_tokens(self) -> Iterator[tuple[int, Json]]:
        """Yield id and entry of each added token: these are found before a text is split into words."""
        entries = {entry["id"]: entry for entry in self.tokenizer.get("added_tokens", [])}
        for number, entry in self.config.get("added_tokens_decoder", {}).items():
            entries.setdefault(int(number), entry)
        for content, number in (_read(self.folder / "added_tokens.json") or {}).items():
            entries.setdefault(number, {"content": content, "special": False})
        yield from sorted(entries.items())

    def special(self, role: str) -> Iterator[str | int]:
        """Yield the text or id of a role's token ("bos"), from the most to the least trusted source."""
        key = f"{role}_token"
        for source in (self.config, _read(self.folder / "special_tokens_map.json") or {}):
            value = source.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                yield value
        for name in ("generation_config.json", "config.json"):
            yield from self.ids(name, f"{key}_id")

    def ids(self, name: str, key: str) -> list[int]:
        """Return the token ids under `key` of a configuration file; [] if there are none."""
        value = (_read(self.folder / name) or {}).get(key)
        return [k for k in (value if isinstance(value, list) else [value]) if isinstance(k, int)]

    def chat_templates(self) -> dict[str, str]:
        """Return chat templates by name, the unnamed one as "default"; files win over the configuration."""
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


def _read(path: Path) -> Json | None:
    """Return a parsed JSON object; None if the file is absent."""
    return read_json(path) if path.is_file() else None


def byte_level(
    files: TokenizerFiles, vocab_size: int, pre: str | None, warn: Warn
) -> tuple[dict[str, Any], Vocabulary]:
    """Return the keys and tokens of byte-level BPE. pre: pre-tokenizer's name; None: detected."""
    stored = files.tokenizer
    model = _bpe(files)
    _check_forms(files, warn, refuse=pre is None)
    vocabulary = {number: Token(text) for text, number in model["vocab"].items()}
    kept = {text for text, number in model["vocab"].items() if number < vocab_size}
    merges = [(a, b) for a, b in model["merges"] if {a, b, a + b} <= kept]
    if pre is None:
        forms = [step["type"] for step in flat(stored["normalizer"], "normalizers")]
        pre = _recognise(files, "NFC" in forms, merges).names[0]
    one_of(pre, pre_tokenizers.BY_NAME, f"--pre-tokenizer {pre} is none that quantkit knows")
    if otherwise := pre_tokenizers.BY_NAME[pre].otherwise:
        warn(f"llama.cpp's {pre} {otherwise}")
    return {"model": "gpt2", "pre": pre, "merges": [f"{a} {b}" for a, b in merges]}, vocabulary


def _recognise(files: TokenizerFiles, nfc: bool, merges: list[Merge]) -> PreTokenizer:
    stored = files.tokenizer
    cuts = pre_tokenizers.cuts(stored["pre_tokenizer"])
    rows = [row for row in pre_tokenizers.ROWS if cuts and pre_tokenizers.cuts(row.pre_tokenizer) == cuts]
    if not rows:
        steps = (step.get("pattern", step) for step in flat(stored["pre_tokenizer"], "pretokenizers"))
        raise QuantkitError(
            f"{files.folder}: llama.cpp has no name for a pre-tokenizer like this one: "
            + ", then ".join(str(step) for step in steps),
            hint=f"name the nearest with --pre-tokenizer NAME: {NAMES}",
            exit_code=UNSUPPORTED,
        )
    ignore_merges = bool(stored["model"].get("ignore_merges"))
    row = min(rows, key=lambda row: (row.ignore_merges != ignore_merges, row.nfc != nfc))
    if row.ignore_merges != ignore_merges:
        _check_reachable(files, row, merges)
    return row


def _check_reachable(files: TokenizerFiles, row: PreTokenizer, merges: list[Merge]) -> None:
    """Raise QuantkitError unless merges make every token, so that ignore_merges does not matter."""
    vocabulary = files.tokenizer["model"]["vocab"]
    added = {entry["content"] for _, entry in files.added_tokens()}
    model = tokenizers.models.BPE(vocabulary, merges)
    unmade = [text for text in vocabulary if text not in added and len(model.tokenize(text)) != 1]
    why = "takes such words whole" if row.ignore_merges else "cannot take such words whole"
    what = f"merges do not make {name_all(map(repr, unmade))}, and llama.cpp's {row.names[0]} {why}"
    hint = f"name another pre-tokenizer with --pre-tokenizer NAME: {NAMES}"
    require(not unmade, f"{files.folder}: {what}", hint, UNSUPPORTED)


def sentencepiece(files: TokenizerFiles, warn: Warn) -> tuple[dict[str, Any], Vocabulary]:
    """Return the keys of a SentencePiece BPE that is stored as merges, and its tokens with scores."""
    model = _bpe(files)
    if not model.get("byte_fallback"):
        raise _refused(files, "which is neither byte-level nor has byte fallback")
    added = {entry["content"] for _, entry in files.added_tokens()}
    types = dict.fromkeys(BYTES, Kind.BYTE) | {model.get("unk_token"): Kind.UNKNOWN}
    normal = model["vocab"].keys() - types.keys() - added
    scores = _scores(files, [(a, b) for a, b in model["merges"] if {a, b, a + b} <= normal], normal)
    missing = [text for byte, text in enumerate(BYTES) if not {text, chr(byte)} & model["vocab"].keys()]
    if missing:
        raise _refused(files, f"which lacks the byte tokens {name_all(missing)}")
    vocabulary = {
        number: Token(text, types.get(text, Kind.NORMAL), scores.get(text, 0.0))
        for text, number in model["vocab"].items()
    }
    return {"model": "llama", "pre": "default"} | _spaces(files, normal, warn), vocabulary


def _scores(files: TokenizerFiles, merges: list[Merge], normal: set[str]) -> dict[str, float]:
    """Return scores by which llama.cpp merges as `merges` do. Raises QuantkitError if none exist."""
    scores = scores_of(merges)
    never_made = sorted(text for text in normal if len(text) > 1 and text not in scores)
    scores |= {text: -float(len(scores) + k) for k, text in enumerate(never_made)}
    expected, expressed = canonical(merges), canonical(from_scores(scores, normal))
    if expected != expressed:
        pairs = itertools.zip_longest(expected, expressed)
        token, _ = next(ours or theirs for ours, theirs in pairs if ours != theirs)
        raise _refused(files, f"whose merges no scores express: those that make {token!r}")
    return scores


def _spaces(files: TokenizerFiles, normal: set[str], warn: Warn) -> dict[str, Any]:
    """Return the keys about spaces, from the normalizer or a Metaspace pre-tokenizer."""
    _check_forms(files, warn)
    prefix = collapse = False
    for step in flat(files.tokenizer["normalizer"], "normalizers"):
        match step:
            case {"type": "Prepend", "prepend": "▁"}:
                prefix = True
                loose = [entry["content"] for _, entry in files.added_tokens() if entry.get("normalized")]
                if loose:  # normalization puts a space before these
                    warn(f"llama.cpp finds {name_all(loose)} also where no space stands before")
            case {"type": "Replace", "pattern": {"Regex": pattern}} if pattern in COLLAPSE:
                collapse = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case {"type": "Strip"}:
                collapse = True
            case {"type": kind} if kind not in FORMS:
                raise _refused(files, f"which normalizes text with {step}")
    for step in flat(files.tokenizer["pre_tokenizer"], "pretokenizers"):
        match step:
            case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}:
                prefix = prefix or scheme != "never"
                if scheme != "never":
                    warn("llama.cpp puts a space also before a text that begins with one")
                if scheme == "first":
                    warn("llama.cpp puts a space also before the text that follows a special token")
                if split and any(SPACE in text[1:] for text in normal):
                    warn("llama.cpp also makes tokens that hold a space after their first character")
            case {"type": "Split", "pattern": {"String": " "}}:
                pass  # the normalizer has replaced all spaces
            case _:
                raise _refused(files, f"which cuts text with {step}")
    if collapse:
        warn("llama.cpp keeps runs of spaces, which this tokenizer makes one")
    return {"add_space_prefix": prefix} | ({"remove_extra_whitespaces": True} if collapse else {})


def _bpe(files: TokenizerFiles) -> Json:
    model = files.tokenizer["model"]
    if model["type"] != "BPE":
        raise _refused(files, f"a {model['type']}")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise _refused(files, f"which has a {key} ({model[key]!r})")
    return model


def _check_forms(files: TokenizerFiles, warn: Warn, refuse: bool = False) -> None:
    """Warn about normalizers; with `refuse`, raise QuantkitError for those that change ordinary text."""
    steps = list(flat(files.tokenizer["normalizer"], "normalizers"))
    other_steps = [str(step) for step in steps if step["type"] not in FORMS]
    if refuse and other_steps:
        raise _refused(files, f"which normalizes text with {', then '.join(other_steps)}")
    forms = [step["type"] for step in steps if step["type"] not in ("Prepend", "Replace", "Strip")]
    if forms:
        warn(f"llama.cpp does not normalize text ({', '.join(forms)})")


def _refused(files: TokenizerFiles, what: str) -> QuantkitError:
    hint = "byte-level BPE and SentencePiece BPE with byte fallback can be exported"
    return QuantkitError(f"{files.folder}: llama.cpp cannot run the tokenizer, {what}", hint, UNSUPPORTED)


# ---- merges: ranked pairs in tokenizer.json, scored pieces in SentencePiece and GGUF files


def scores_of(merges: Iterable[Merge]) -> dict[str, float]:
    """Return the score of every merged token: 0 for the first merge, then -1, -2, …."""
    products = dict.fromkeys(left + right for left, right in merges)
    return {token: -float(k) for k, token in enumerate(products)}


def from_scores(scores: Mapping[str, float], tokens: Collection[str]) -> list[Merge]:
    """Return all pairs of `tokens` that make a scored token, highest score first: the inverse of `scores_of`.

    SentencePiece and llama.cpp merge the neighbours whose token has the highest score, so all ways to split a
    token are merges of one rank (here the longer left half goes first).
    """
    merges = [
        (-score, -cut, token)
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    ]
    return [(token[:-cut], token[-cut:]) for _, cut, token in sorted(merges)]


def canonical(merges: Iterable[Merge]) -> list[tuple[str, list[Merge]]]:
    """Return merges in a canonical form: equal if two lists differ only in the order of neighbouring merges
    that make the same token."""
    runs = itertools.groupby(merges, key="".join)
    return [(token, sorted(run)) for token, run in runs]
