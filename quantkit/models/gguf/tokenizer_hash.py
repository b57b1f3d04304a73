"""Hashes that are equal for tokenizers that do the same, in whatever format they are stored."""

import hashlib
import json
import math

from quantkit.errors import name_all
from quantkit.models.gguf.pre_tokenizers import cuts, is_byte_level
from quantkit.models.gguf.token_models import BYTES, SPACE, canonical

SAMPLE = """Hello  World's 1234 -- naïve café, Ünïcödé; they'RE 12 and I'll pay $1,234.56 (or 7%)!
\tdef f(x_1: list[int]) -> dict:   # HTTPServer/parseJSON2 camelCase
\t\treturn {"a": x_1[0] ** 2, 'b': f"{x_1!r:>10}"} if x_1 else None


    if (i != 0 && *p++ == 'x') { goto end; } /* ¿qué? */ <a href="https://example.org/a/b?c=d&e=f">

The quick brown fox jumps over the lazy dog.  Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich.
Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.
안녕하세요, 세계! 키스의 고유조건은 입술끼리 만나야 하고 123개의 한글과 ㄱㄴㄷ.
私の名前は「中野」です。いろはにほへと ﾊﾝｶｸ １２３。我能吞下玻璃而不伤身体。
שלום עולם, مرحبا بالعالم ١٢٣، नमस्ते दुनिया १२३। สวัสดีชาวโลก ៣៤ tiếng Việt
👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇰🇷 ☕️ ½ Ⅷ x² → ∞ ≠ … “quotes” ‘n’ — €5\xa0m\u3000wide\r\n  end \n \n"""

_LAST: dict[tuple[str, float], str] = {}  # of the last tokenizer: copies of a model often have the same


def tokenizer_sha256(tokenizer, vocab_size: int | None = None) -> str:
    """Return a hash of the vocabulary and of how text is split. Equal hashes mean comparable perplexities.

    A checkpoint folder and the GGUF file made from it have equal hashes. Normalization counts only if it
    changes SAMPLE, so NFC does not. vocab_size: rows of the embedding; tokens beyond do not count.
    """
    size = math.inf if vocab_size is None else vocab_size
    # slow tokenizers do not give their merges; SAMPLE stands for them
    stored = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else ""
    if (known := (stored, size)) in _LAST:
        return _LAST[known]
    sample = tokenizer(SAMPLE, add_special_tokens=False, verbose=False)["input_ids"]
    rules = _rules(json.loads(stored), size) if stored else []
    found = hashlib.sha256(repr((_vocabulary(tokenizer, size), sample, rules)).encode()).hexdigest()
    _LAST.clear()
    _LAST.update({known: found} if stored else {})
    return found


def difference(first, other, vocab_sizes: tuple[int, int]) -> str:
    """Return a sentence that says how two tokenizers with different hashes differ."""
    both = zip((first, other), vocab_sizes, strict=True)
    ours, theirs = ({text for _, text in _vocabulary(*side)} for side in both)
    changes = {"lacks": sorted(ours - theirs), "adds": sorted(theirs - ours)}
    named = [f"{verb} {name_all(map(repr, tokens), 3)}" for verb, tokens in changes.items() if tokens]
    if named:
        return f"the vocabulary has {len(theirs)} tokens instead of {len(ours)}, it " + ", ".join(named)
    return "the tokens are the same, but not their ids, merges or the way to cut a text"


def _vocabulary(tokenizer, size: float) -> list[tuple[int, str]]:
    """Return ids below `size` and texts of all tokens."""
    vocabulary = tokenizer.get_vocab().items()
    return sorted((number, text.replace(SPACE, " ")) for text, number in vocabulary if number < size)


def _rules(stored: dict, size: float) -> list:
    """Return rules that may differ between tokenizers with one vocabulary, in a canonical form."""
    model, pre_tokenizer = stored["model"], stored["pre_tokenizer"]
    if model["type"] != "BPE" or not (model["byte_fallback"] or is_byte_level(pre_tokenizer)):
        return [stored["normalizer"], pre_tokenizer, model]
    apart = {entry["content"] for entry in stored["added_tokens"]} | {*BYTES, model["unk_token"]}
    tokens = {text for text, number in model["vocab"].items() if number < size and text not in apart}
    merges = [(a, b) for a, b in model["merges"] if {a, b, a + b} <= tokens]
    made = {a + b for a, b in merges}
    whole = model["ignore_merges"] and any(len(text) > 1 and text not in made for text in tokens)
    words = (cuts(pre_tokenizer) or pre_tokenizer) if is_byte_level(pre_tokenizer) else None
    return [canonical(merges), words, whole]
