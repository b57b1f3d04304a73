"""How a byte-level BPE cuts text into words, and the name llama.cpp has for it (`tokenizer.ggml.pre`).

llama.cpp has a fixed list of names with their regular expressions (`src/llama-vocab.cpp`,
`llm_tokenizer_bpe`). A row here is one way of cutting, as tokenizer.json writes it, with every name that
stands for it. A tokenizer is recognised by how it cuts, never by its vocabulary.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

Json = dict  # a pre-tokenizer or normalizer as tokenizer.json writes it

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = f"{CONTRACTION}|{WORD}|" + r"\p{N}{1,3}" + SYMBOLS + SPACES
QWEN2 = f"{CONTRACTION}|{WORD}|" + r"\p{N}" + SYMBOLS + SPACES
MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
QWEN35 = f"{CONTRACTION}|{MARKED_WORD}|" + r"\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + SPACES
SEED = f"{CONTRACTION}|{WORD}|" + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + SPACES
MINICPM5 = f"{CONTRACTION}|{WORD}|" + r"\p{N}+" + SYMBOLS + SPACES
JAIS2_SPACES = "".join(rf"|\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
JAIS2 = f"{CONTRACTION}|{WORD}|" + r"\p{N}{1,3}" + SYMBOLS + r"|\s*[\r\n]+" + JAIS2_SPACES + r"|\s{1}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + "+", r"[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER + "*"
PATHS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES
TEKKEN = f"{CASED[0]}|{CASED[1]}|" + r"\p{N}" + PATHS
GPT4O = f"{CASED[0]}{CONTRACTION}?|{CASED[1]}{CONTRACTION}?|" + r"\p{N}{1,3}" + PATHS
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
DEEPSEEK_LETTERS = (  # cased letters
    r"\s?["
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-"
    "ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃ"
    "ↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
    "]+"
)
DEEPSEEK_MARKS = r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"
DEEPSEEK_CJK = "[一-龥\u0800-一가-\ud7ff]+"
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*" + SPACES,
)
DIGITS: Json = {"type": "Digits", "individual_digits": True}
NFC: Json = {"type": "NFC"}


def split(pattern: str) -> Json:
    """Every match of a regular expression becomes a word, and so does what lies between matches."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def byte_level(use_regex: bool = False) -> Json:
    """Bytes to printable characters; with `use_regex`, words are cut by GPT-2's expression first."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


FALCON = (
    {"type": "Punctuation", "behavior": "Contiguous"},
    byte_level(use_regex=True),
    {"type": "Digits", "individual_digits": False},
    split("[0-9][0-9][0-9]"),
)


NO_MARKS = "ends words at combining marks, as of Hindi, and knows no capitals but A to Z"
ASCII_SPACES = "does not take the wider white space of Unicode for a space"


@dataclass(frozen=True)
class PreTokenizer:
    """A way to cut text into words. names: what llama.cpp calls it; the first is what files get.

    nfc: models of these names normalize text to NFC first; llama.cpp does not. ignore_merges: a word that
    is a token becomes it, whatever the merges say. add_bos: what holds when a file does not say.
    otherwise: where llama.cpp's expression of that name cuts ordinary text in other words.
    """

    names: tuple[str, ...]
    steps: tuple[Json, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    otherwise: str = ""

    @property
    def normalizer(self) -> Json | None:
        return NFC if self.nfc else None

    @property
    def pre_tokenizer(self) -> Json:
        return {"type": "Sequence", "pretokenizers": list(self.steps)}


def _regex(*patterns: str) -> tuple[Json, ...]:
    return (*map(split, patterns), byte_level())


ROWS = (
    PreTokenizer(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _regex(LLAMA3),
        ignore_merges=True,
        add_bos=True,
    ),
    PreTokenizer(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _regex(LLAMA3)),
    PreTokenizer(
        ("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "bailingmoe", "solar-open", "grok-2"),
        _regex(QWEN2),
        nfc=True,
    ),
    PreTokenizer(("qwen35",), _regex(QWEN35), nfc=True),
    PreTokenizer(
        ("gpt-2", "phi-2", "mpt", "jais", "gigachat", "trillion", "mellum", "exaone4", "granite-docling"),
        (byte_level(use_regex=True),),
    ),
    PreTokenizer(("olmo",), (byte_level(use_regex=True),), nfc=True),
    PreTokenizer(
        ("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b"),
        (DIGITS, byte_level(use_regex=True)),
    ),
    PreTokenizer(("command-r",), (DIGITS, byte_level(use_regex=True)), nfc=True),
    PreTokenizer(("falcon",), FALCON),
    PreTokenizer(("bloom", "gpt3-finnish", "poro-chat"), _regex(BLOOM)),
    PreTokenizer(("viking",), (split(BLOOM), DIGITS, byte_level())),
    PreTokenizer(("tekken",), _regex(TEKKEN), ignore_merges=True, add_bos=True, otherwise=NO_MARKS),
    PreTokenizer(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _regex(GPT4O), otherwise=NO_MARKS),
    PreTokenizer(
        ("deepseek-llm",),
        (
            *map(split, (r"[\r\n]", DEEPSEEK_LETTERS, DEEPSEEK_MARKS, r"\s+$", DEEPSEEK_CJK)),
            DIGITS,
            byte_level(),
        ),
        otherwise=ASCII_SPACES,
    ),
    PreTokenizer(
        ("deepseek-coder",),
        (*map(split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK)), DIGITS, byte_level()),
        otherwise=ASCII_SPACES,
    ),
    PreTokenizer(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _regex(*DEEPSEEK_V3)),
    PreTokenizer(("seed-coder",), _regex(SEED)),
    PreTokenizer(("jais-2",), _regex(JAIS2)),
    PreTokenizer(("default",), _regex(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    PreTokenizer(("minicpm5",), _regex(r"\p{N}{1,3}", MINICPM5), ignore_merges=True),
)


@cache
def by_name() -> dict[str, PreTokenizer]:
    """Every name llama.cpp knows and we do."""
    return {name: row for row in ROWS for name in row.names}


def recognise(pre_tokenizer: Json | None) -> list[PreTokenizer]:
    """The rows that cut text as this pre-tokenizer does; none when it is none of llama.cpp's."""
    found = cuts(pre_tokenizer)
    return [row for row in ROWS if found is not None and cuts(row.pre_tokenizer) == found]


def cuts(pre_tokenizer: Json | None) -> tuple[str, ...] | None:
    """What a pre-tokenizer does, one step after the other: equal for those that cut alike.

    None where it does what no byte-level BPE of llama.cpp does, such as a space put before the text.
    """
    steps = []
    for step in flat(pre_tokenizer):
        found = _cut(step)
        if found is None:
            return None
        steps += found
    return tuple(steps) if "bytes" in steps else None


def flat(step: Json | None, inside: str = "pretokenizers") -> Iterator[Json]:
    """The steps of a pre-tokenizer, or normalizer (`inside` "normalizers"), one after the other."""
    if step is None:
        return
    if step["type"] == "Sequence":
        for inner in step[inside]:
            yield from flat(inner, inside)
    else:
        yield step


def is_byte_level(pre_tokenizer: Json | None) -> bool:
    """Whether it makes printable characters of bytes."""
    return any(step["type"] == "ByteLevel" for step in flat(pre_tokenizer))


def _cut(step: Json) -> list[str] | None:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return [_plain(GPT2), "bytes"] if step.get("use_regex", True) else ["bytes"]
        case {"type": "Digits"}:
            return [r"\p{N}" if step["individual_digits"] else r"\p{N}+"]
        case {"type": "Punctuation"}:
            return [f"punctuation {step['behavior']}"]
        case {"type": "Split", "pattern": {"Regex": pattern}}:
            kept = step["behavior"], step.get("invert", False)
            # Removing what does not match leaves the matches: the same where everything matches.
            return [_plain(pattern)] if kept in (("Isolated", False), ("Removed", True)) else None
    return None


SPELLINGS = (  # ways to write the same expression -> one of them
    ("\r", r"\r"),
    ("\n", r"\n"),
    ("?+", "?"),  # possessive: nothing that was given back could match here
    ("++", "+"),
    ("*+", "*"),
    ("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", CONTRACTION),
    ("'(?i:[sdmt]|ll|ve|re)", CONTRACTION),
    (r"|\s*[\r\n]|", r"|\s*[\r\n]+|"),  # what comes before takes all line ends but the last
    (r"\p{N}{1}", r"\p{N}"),
)


def _plain(pattern: str) -> str:
    pattern = unicodedata.normalize("NFC", pattern)
    for spelling, plain in SPELLINGS:
        pattern = pattern.replace(spelling, plain)
    return pattern
