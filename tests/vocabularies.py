"""Tokenizers of every kind, made here, and GGUF files that hold them."""

import functools
import itertools
import json
import random
from pathlib import Path

import numpy as np
import transformers as hf
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers.tokenization_utils_base import generate_merges

from quantkit.models.files.gguf_writer import Entry, writing
from quantkit.models.gguf.pre_tokenizers import ROWS
from quantkit.models.gguf.tokenizer_hash import SAMPLE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIAL = ("<s>", "</s>", "<unk>")
TEXTS = [
    *SAMPLE.splitlines(keepends=True),
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


@functools.cache
def trained(row: int) -> str:
    """tokenizer.json of a byte-level BPE of 700 tokens whose words are cut as ROWS[row] says."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    stored = json.loads(tokenizer.to_str()) | {
        "normalizer": {"type": "NFC"} if ROWS[row].nfc else None,
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


def pairs(row: int, order: int = 0, more: tuple[str, ...] = ()) -> str:
    """tokenizer.json of a BPE that merges any two bytes of TEXTS (and `more`) once: ids show the cuts."""
    mapped = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = [*TEXTS, *map(str.swapcase, TEXTS), *more]
    words = [word for text in texts for word, _ in mapped.pre_tokenize_str(text)]
    merges = sorted({pair for word in words for pair in itertools.pairwise(word)})
    random.Random(order).shuffle(merges)
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    model = models.BPE({token: k for k, token in enumerate(tokens)}, merges)
    stored = json.loads(Tokenizer(model).to_str())
    return json.dumps(stored | {"pre_tokenizer": ROWS[row].pre_tokenizer})


@functools.cache
def pieces() -> tuple[tuple[str, int], ...]:
    """Tokens of a BPE as SentencePiece orders them: special, bytes, merged, runs of spaces, characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=900, limit_alphabet=120, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    letters = [token for token in model["vocab"] if len(token) == 1]
    runs = ["▁" * count for count in range(2, 9)]
    special = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    bytes_ = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    return (*special, *bytes_, *((token, NORMAL) for token in dict.fromkeys([*merged, *runs, *letters])))


def merged_pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges, as transformers makes them of pieces in order."""
    vocabulary = {token: k for k, (token, _) in enumerate(pieces())}
    return vocabulary, generate_merges(vocabulary, skip_tokens=[t for t, kind in pieces() if kind != NORMAL])


def spaced(prefix: bool = True) -> str:
    """tokenizer.json with the spaces done in the normalizer: as of Llama 2, or without prefix, of Gemma."""
    vocabulary, merges = merged_pieces()
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps = [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken("<|user|>", normalized=False), AddedToken("<▁x▁>", normalized=False)])
    return tokenizer.to_str()


def save(folder: Path, tokenizer: str, bos: bool = False, **config) -> hf.PreTrainedTokenizerFast:
    """Write a tokenizer's files and load them; with `bos`, it begins texts with `<s>`."""
    backend = Tokenizer.from_str(tokenizer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | config
    hf.PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    return hf.AutoTokenizer.from_pretrained(folder)


def gguf(path: Path, keys: dict) -> Path:
    """A file of a tiny llama of zeros, with these keys."""
    width = 32
    lengths = ("context_length", "embedding_length", "feed_forward_length", "rope.dimension_count")
    shape = {f"llama.{key}": width for key in lengths}
    shape |= {"llama.block_count": 1, "llama.attention.head_count": 1}
    shape |= {"llama.attention.layer_norm_rms_epsilon": 1e-5, "general.architecture": "llama"}
    linears = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {"token_embd": (len(keys["tokenizer.ggml.tokens"]), width), "output_norm": (width,)}
    shapes |= {f"blk.0.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.{name}": (width, width) for name in linears}
    entries = [Entry(f"{name}.weight", "F32", size) for name, size in shapes.items()]
    with writing(path, shape | keys, entries) as write:
        for entry in entries:
            write(entry.name, [np.zeros(entry.shape, np.float32)])
    return path


def ids_of(tokenizer, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
    options = dict(add_special_tokens=add_special, split_special_tokens=not parse_special, verbose=False)
    return tokenizer(text, **options)["input_ids"]
