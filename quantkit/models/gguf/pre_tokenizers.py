"""How byte-level BPE splits text into words, and llama.cpp's names for it (`tokenizer.ggml.pre`).

llama.cpp has a fixed list of names with their regular expressions (`src/llama-vocab.cpp`,
`llm_tokenizer_bpe`). A row of pre_tokenizers.json is one way to split, as in tokenizer.json, with all its
names. quantkit recognises a tokenizer by how it splits, never by its vocabulary.
"""

import json
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Json = dict  # a pre-tokenizer or normalizer as tokenizer.json writes it
CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_stored = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
PATTERNS: dict[str, str] = _stored["patterns"]
WORDS: Json = _stored["steps"]["words"]  # GPT-2's expression and its printable characters for bytes


def split(pattern: str) -> Json:
    """Return a step that splits a text into the matches of a regular expression and the text between them."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@dataclass(frozen=True)
class PreTokenizer:
    """A way to split text into words. names: llama.cpp's names of it; files get the first.

    steps: names of patterns to split at, and of other steps. nfc: models with these names normalize text to
    NFC first; llama.cpp does not. ignore_merges: a word that is a token becomes it, whatever the merges say.
    add_bos: default if a file does not say. otherwise: where llama.cpp splits ordinary text differently.
    """

    names: list[str]
    steps: list[str]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    otherwise: str = ""

    @property
    def pre_tokenizer(self) -> Json:
        steps = [_stored["steps"].get(step) or split(PATTERNS[step]) for step in self.steps]
        return {"type": "Sequence", "pretokenizers": steps}


ROWS = tuple(PreTokenizer(**row) for row in _stored["rows"])
BY_NAME = {name: row for row in ROWS for name in row.names}


def cuts(pre_tokenizer: Json | None) -> tuple[str, ...] | None:
    """Return the steps of a pre-tokenizer in a canonical form: equal if two split text in the same way.

    None if no byte-level BPE of llama.cpp does the same, for example adds a space before the text.
    """
    steps = []
    for step in flat(pre_tokenizer):
        cut = _cut(step)
        if cut is None:
            return None
        steps += cut
    return tuple(steps) if "bytes" in steps else None


def flat(step: Json | None, inside: str = "pretokenizers") -> Iterator[Json]:
    """Yield the steps of nested sequences in order. inside: "pretokenizers" or "normalizers"."""
    if step is None:
        return
    if step["type"] == "Sequence":
        for inner in step[inside]:
            yield from flat(inner, inside)
    else:
        yield step


def is_byte_level(pre_tokenizer: Json | None) -> bool:
    """Return whether a pre-tokenizer maps bytes to printable characters."""
    return any(step["type"] == "ByteLevel" for step in flat(pre_tokenizer))


def _cut(step: Json) -> list[str] | None:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return [_plain(PATTERNS["gpt2"]), "bytes"] if step.get("use_regex", True) else ["bytes"]
        case {"type": "Digits"}:
            return [r"\p{N}" if step["individual_digits"] else r"\p{N}+"]
        case {"type": "Punctuation"}:
            return [f"punctuation {step['behavior']}"]
        case {"type": "Split", "pattern": {"Regex": pattern}}:
            kept = step["behavior"], step.get("invert", False)
            # Removing what does not match leaves the matches: the same where everything matches.
            return [_plain(pattern)] if kept in (("Isolated", False), ("Removed", True)) else None
    return None


SPELLINGS = (  # spelling of an expression -> canonical spelling
    ("\r", r"\r"),
    ("\n", r"\n"),
    ("?+", "?"),  # possessive: backtracking could not match here
    ("++", "+"),
    ("*+", "*"),
    ("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", CONTRACTION),
    ("'(?i:[sdmt]|ll|ve|re)", CONTRACTION),
    (r"|\s*[\r\n]|", r"|\s*[\r\n]+|"),  # the alternative before takes all line ends but the last
    (r"\p{N}{1}", r"\p{N}"),
)


def _plain(pattern: str) -> str:
    pattern = unicodedata.normalize("NFC", pattern)
    for spelling, plain in SPELLINGS:
        pattern = pattern.replace(spelling, plain)
    return pattern
