"""Tokenizers to GGUF metadata and back: ids as transformers has them, and as the real llama.cpp has them."""

import functools
import itertools
import json
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import transformers as hf
from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers.tokenization_utils_base import generate_merges

from quantkit.errors import NOT_FOUND, RUNTIME, UNSUPPORTED, USAGE, QuantkitError
from quantkit.llamacpp import sentencepiece
from quantkit.llamacpp.pre_tokenizers import ROWS, by_name, recognise
from quantkit.llamacpp.tokenizer import from_metadata
from quantkit.llamacpp.vocabulary import metadata
from quantkit.tokenizer_hash import SAMPLE, tokenizer_sha256

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIAL = ("<s>", "</s>", "<unk>")
TEXTS = [
    *SAMPLE.splitlines(keepends=True),
    SAMPLE,
    "",
    " ",
    "\n",
    "a",
    "     ",
    "\n\n\n",
    "\t\t \n  \n",
    " leading, and trailing   ",
    "a\r\n\r\n\r\n  b\r c",
    "1 12 123 1234 12345678901 3.14 1,000,000 ١٢٣٤ ½¾",
    "don't DON'T I'll we'VE he'S 'tis y'all'd",
    "!!!??? ... --- /* */ // <<>> {}[]() #@$%^&*~`|\\",
    "naïveÉÀ ÅNGSTRÖM straße ΑΒΓδ Дом",
    "세종대왕이 1443년에 훈민정음을 만들었다.",
    "👩‍👩‍👧‍👦👍🏽🇰🇷 a👍b",
    "مرحبا ١٢ שלום",
    "<s>a</s> b<|user|> c <|user|>",
]
CORPUS = [SAMPLE] * 8 + [
    path.read_text(encoding="utf-8")[:12000] for path in Path(__file__).parents[1].glob("calibration/*.txt")
]


# ---- tokenizers, made here


@functools.cache
def trained(row: int) -> str:
    """tokenizer.json of a byte-level BPE of 700 tokens whose words are cut as ROWS[row] says."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    stored = json.loads(tokenizer.to_str()) | {
        "normalizer": ROWS[row].normalizer,
        "pre_tokenizer": ROWS[row].pre_tokenizer,
    }
    tokenizer = Tokenizer.from_str(json.dumps(stored))
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<|user|>"])
    stored = json.loads(tokenizer.to_str())
    stored["model"]["ignore_merges"] = ROWS[row].ignore_merges
    return json.dumps(stored)


def pairs(row: int) -> str:
    """tokenizer.json of a BPE that merges any two bytes of TEXTS once: its ids show every cut."""
    mapped = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [word for text in [*TEXTS, *map(str.swapcase, TEXTS)] for word, _ in mapped.pre_tokenize_str(text)]
    merges = sorted({pair for word in words for pair in itertools.pairwise(word)}, key=lambda pair: hash_of(pair))
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    model = models.BPE({token: k for k, token in enumerate(tokens)}, merges)
    stored = json.loads(Tokenizer(model).to_str())
    return json.dumps(stored | {"pre_tokenizer": ROWS[row].pre_tokenizer})


def hash_of(pair: tuple[str, str]) -> int:
    return (ord(pair[0]) * 7919 + ord(pair[1]) * 104729) % 65537


def save(folder: Path, tokenizer: str, bos: bool = False, **config) -> hf.PreTrainedTokenizerFast:
    """Write a tokenizer's files; with `bos`, it begins texts with `<s>`. Returns it as transformers loads it."""
    backend = Tokenizer.from_str(tokenizer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | config
    hf.PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    return hf.AutoTokenizer.from_pretrained(folder)


# ---- llama.cpp


def gguf(path: Path, keys: dict) -> Path:
    """A file of a tiny llama of zeros, with these keys."""
    count, width = len(keys["tokenizer.ggml.tokens"]), 32
    writer = GGUFWriter(path, "llama")
    for key in ("context_length", "embedding_length", "feed_forward_length", "rope.dimension_count"):
        writer.add_uint32(f"llama.{key}", width)
    for key in ("block_count", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, value in keys.items():
        add.get(type(value), writer.add_array)(key, value.tolist() if isinstance(value, np.ndarray) else value)
    writer.add_tensor("token_embd.weight", np.zeros((count, width), np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(width, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros(width, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((width, width), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def llama(tmp_path):
    """`llama(keys)` -> the vocabulary as llama.cpp loads it."""
    pytest.importorskip("xllamacpp")
    from llama_cpp import Llama

    opened = []

    def load(keys: dict) -> Llama:
        opened.append(Llama(gguf(tmp_path / f"{len(opened)}.gguf", keys)))
        return opened[-1]

    yield load
    for model in opened:
        model.__exit__()


MODES = [dict(add_special=a, parse_special=b) for a in (False, True) for b in (False, True)]


def ids_of(tokenizer, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
    options = dict(add_special_tokens=add_special, split_special_tokens=not parse_special, verbose=False)
    return tokenizer(text, **options)["input_ids"]


def assert_same(expected, found, texts=TEXTS) -> None:
    """Equal ids of every text, with and without the tokens around it, and with names of tokens in it."""
    ids = found.tokenize if hasattr(found, "logits") else functools.partial(ids_of, found)
    for text, mode in itertools.product(texts, MODES):
        assert ids(text, **mode) == ids_of(expected, text, **mode), (text, mode)
