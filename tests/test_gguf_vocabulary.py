"""Tokenizers in GGUF files: ids as transformers has them, by the real llama.cpp and read back by us."""

import functools
import itertools
import re
import unicodedata

import gguf_files
import pytest
import transformers as hf
from nights import by_day
from vocabularies import (
    TEXTS,
    gguf,
    ids_of,
    merged_pieces,
    pairs,
    save,
    spaced,
    trained,
)

from quantkit.errors import QuantkitError
from quantkit.evaluation.evaluate import check_comparable
from quantkit.models.files.gguf_file import read_header
from quantkit.models.files.open import open_checkpoint
from quantkit.models.gguf import tokenizer_hash
from quantkit.models.gguf.metadata import of_folder as metadata
from quantkit.models.gguf.pre_tokenizers import BY_NAME, ROWS
from quantkit.models.gguf.tokenizer import from_metadata
from quantkit.models.gguf.tokenizer_hash import SAMPLE, tokenizer_sha256

pytest.importorskip("xllamacpp")
from llama_cpp import Llama  # noqa: E402


@pytest.fixture
def llama(tmp_path):
    """`llama(keys)` -> the vocabulary as llama.cpp loads it, from 0.gguf, 1.gguf, ... in tmp_path."""
    opened = []

    def load(keys: dict) -> Llama:
        opened.append(Llama(gguf(tmp_path / f"{len(opened)}.gguf", keys)))
        return opened[-1]

    yield load
    for model in opened:
        model.__exit__()


MODES = {"add_special": False, "parse_special": False}, {"add_special": True, "parse_special": True}


def assert_same(expected, found, texts=TEXTS) -> None:
    """Equal ids of every text, with and without the tokens around it, and with names of tokens in it."""
    ids = found.tokenize if isinstance(found, Llama) else functools.partial(ids_of, found)
    for text, mode in itertools.product(texts, MODES):
        assert ids(text, **mode) == ids_of(expected, text, **mode), (text, mode)


# ---- byte-level BPE


def unlike(name: str, text: str) -> bool:
    """Whether llama.cpp is known to cut a text otherwise: see test_what_llama_cpp_cuts_otherwise."""
    categories = {unicodedata.category(character) for character in text if character not in " \n\r\t"}
    if name in ("tekken", "gpt-4o"):
        return any(category[0] == "M" for category in categories)
    return name in ("deepseek-llm", "deepseek-coder") and bool(categories & {"Zs", "Zl", "Zp", "Cc"})


DAY = ("gpt-2", "llama-bpe", "qwen2", "deepseek-v3", "tekken", "jais-2", "gpt-4o", "default")


@pytest.mark.parametrize(
    "row",
    by_day(range(len(ROWS)), [number for number, row in enumerate(ROWS) if row.names[0] in DAY]),
    ids=lambda row: ROWS[row].names[0],
)
def test_byte_level_text_is_read_alike_everywhere(row, tmp_path, llama):
    tokenizer = save(tmp_path, trained(row), bos=row % 2 == 0)
    name, *others = ROWS[row].names
    keys = metadata(tmp_path, size := len(tokenizer) + 5)
    assert keys["tokenizer.ggml.pre"] == name
    assert_same(tokenizer, llama(keys), [text for text in TEXTS if not unlike(name, text)])
    back = from_metadata(read_header(tmp_path / "0.gguf")[0])
    assert_same(tokenizer, back)
    assert tokenizer_sha256(back, size) == tokenizer_sha256(tokenizer, size)
    assert all(back.decode(ids_of(back, text)) == text for text in TEXTS)
    for other in others:
        model = llama(keys | {"tokenizer.ggml.pre": other})
        for text in SAMPLE.splitlines(keepends=True):
            assert unlike(name, text) or model.tokenize(text) == ids_of(tokenizer, text), other


OTHERWISE = {  # texts that llama.cpp cuts in other words than the tokenizers of these names do
    "llama-bpe": ["it'ſa"],  # the long s ends no contraction
    "qwen2": ["it'ſa"],
    "tekken": ["नमस्ते", "bÀ"],  # marks end words; capitals are A to Z
    "gpt-4o": ["नमस्ते", "bÀ"],
    "deepseek-coder": ["\u3000a\u3000b\u3000c"],  # of white space, that of ASCII
    "deepseek-llm": ["\u3000a\u3000b\u3000c", "77"],  # and numbers are one word
    "falcon": ["м"],  # bytes that look like digits are words
}
ODD = tuple(text for texts in OTHERWISE.values() for text in texts)
ALIKE = [row.names[0] for row in ROWS if row.names[0] not in set(OTHERWISE) - {"llama-bpe", "qwen2"}]


@pytest.mark.parametrize("name", by_day(ALIKE, DAY))
def test_llama_cpp_cuts_words_where_transformers_does(name, tmp_path, llama):
    """With merges between any two bytes, so that no cut goes unseen."""
    tokenizer = save(tmp_path, pairs(ROWS.index(BY_NAME[name])))
    model = llama(metadata(tmp_path, len(tokenizer), name))
    for text in [*TEXTS, *map(str.swapcase, TEXTS)]:
        text = unicodedata.normalize("NFC", text)
        assert model.tokenize(text) == ids_of(tokenizer, text), text


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_llama_cpp_cuts_otherwise(name, tmp_path, llama):
    """Where this fails, llama.cpp has become better and `unlike` can go."""
    unseen = set(OTHERWISE[name])
    for order in range(8):
        tokenizer = save(tmp_path, pairs(ROWS.index(BY_NAME[name]), order, ODD))
        model = llama(metadata(tmp_path, len(tokenizer), name))
        unseen = {text for text in unseen if model.tokenize(text) == ids_of(tokenizer, text)}
        if not unseen:
            return
    pytest.fail(f"cut alike: {unseen}")


# ---- SentencePiece


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_text_is_read_alike_everywhere(prefix, tmp_path, llama):
    tokenizer = save(tmp_path, spaced(prefix), bos=prefix)
    keys = metadata(tmp_path, len(tokenizer) + 3)
    assert keys["tokenizer.ggml.add_space_prefix"] is prefix
    assert keys["tokenizer.ggml.add_bos_token"] is prefix
    assert_same(tokenizer, llama(keys))
    back = from_metadata(read_header(tmp_path / "0.gguf")[0])
    assert_same(tokenizer, back)
    assert tokenizer_sha256(back, len(tokenizer) + 3) == tokenizer_sha256(tokenizer)
    assert all(back.decode(ids_of(back, text)) == text for text in TEXTS if "<|user|>" not in text)


@pytest.mark.parametrize("make", [hf.LlamaTokenizer, hf.GemmaTokenizer])
def test_tokenizers_that_transformers_builds_itself(make, tmp_path, llama):
    """Metaspace puts no space before a text that has one, nor between a special token and the text."""
    vocabulary, merges = merged_pieces()
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    make(vocab=vocabulary, merges=merges, **names).save_pretrained(tmp_path)
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path)
    warnings = []
    keys = metadata(tmp_path, len(tokenizer), warn=warnings.append)
    assert tokenizer_sha256(from_metadata(keys)) == tokenizer_sha256(tokenizer)
    model = llama(keys)
    texts = TEXTS if make is hf.GemmaTokenizer else [text for text in TEXTS if text[:1] not in (" ", "<")]
    assert_same(tokenizer, model, texts)
    differing = [text for text in TEXTS if model.tokenize(text) != ids_of(tokenizer, text)]
    assert len(warnings) == (2 if differing else 0) and bool(differing) == (make is hf.LlamaTokenizer)


def test_files_that_others_trained(shared, tmp_path, llama):
    for name in ("llama2xs-279K", "babyllama-1M-char361"):
        folder = shared / "models" / name
        tokenizer = hf.AutoTokenizer.from_pretrained(folder)
        warnings = []
        keys = metadata(folder, len(tokenizer), warn=warnings.append)
        assert warnings == ["llama.cpp keeps runs of spaces, which this tokenizer makes one"]
        texts = [re.sub(" {2,}", " ", text).strip(" ") for text in TEXTS]
        assert_same(tokenizer, llama(keys), [text for text in texts if "> " not in text])
        assert_same(tokenizer, back := from_metadata(keys))
        assert tokenizer_sha256(back) == tokenizer_sha256(tokenizer)


def test_the_demo_model(demo_model, llama):
    tokenizer = hf.AutoTokenizer.from_pretrained(demo_model)
    keys = metadata(demo_model, 4096)
    assert keys["tokenizer.ggml.pre"] == "gpt-2"
    assert_same(tokenizer, llama(keys))
    assert_same(tokenizer, back := from_metadata(keys))
    assert tokenizer_sha256(back, 4096) == tokenizer_sha256(tokenizer, 4096)


def test_a_tokenizer_that_copies_share_is_hashed_once(demo_model, monkeypatch):
    """262,144 tokens take 4 seconds, and a model and its copies have the same."""
    computed, rules = [], tokenizer_hash._rules
    monkeypatch.setattr(tokenizer_hash, "_rules", lambda *_: computed.append(1) or rules(*_))
    first, copy = (hf.AutoTokenizer.from_pretrained(demo_model) for _ in range(2))
    wanted = tokenizer_sha256(first, 4095)
    assert tokenizer_sha256(copy, 4095) == wanted and len(computed) == 1
    assert tokenizer_sha256(copy, 4094) != wanted and len(computed) == 2
    copy.add_tokens(["<new>"])
    assert tokenizer_sha256(copy) != tokenizer_sha256(first) and len(computed) == 4


# ---- checkpoints


def test_a_file_and_its_folder_are_comparable(tiny_model, tmp_path):
    folder = tiny_model("llama", tokenizer="bos", vocab_size=576)
    checkpoint = open_checkpoint(str(folder))
    file = gguf_files.export(folder, tmp_path / "same.gguf", extra=metadata(folder, 576))
    read = open_checkpoint(str(file))
    check_comparable([checkpoint, read])
    assert_same(checkpoint.tokenizer, read.tokenizer)
    with Llama(file, 256) as llama:
        assert_same(checkpoint.tokenizer, llama)
    other = gguf_files.export(folder, tmp_path / "other.gguf", extra=metadata(folder, 576, "starcoder"))
    with pytest.raises(QuantkitError, match="different tokenizers"):
        check_comparable([checkpoint, open_checkpoint(str(other))])
