"""Long texts in pieces have the ids of the whole; tokenizers of strangers end in a line."""

import json
import tracemalloc

import families
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.models.files import tokenizing
from quantkit.models.files.open import open_checkpoint

LINES = families.sentences(600)
WHOLE = tokenizing._ids
TEXTS = {
    "lines": "\n".join(LINES),
    "paragraphs": "\n\n".join(LINES),
    "blank and indented": "\n \n   ".join(LINES),
    "carriage returns": "\r\n".join(LINES),
    "one line": " ".join(LINES),
    "nothing but spaces": " " * 9000,
    "no space": "".join(LINES).replace(" ", ""),
}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    """Byte-level as GPT-2's, which joins line ends; and sentencepiece's way, a sign before each text."""
    made = {}
    for name, pre, normalizer in [
        ("bytes", pre_tokenizers.ByteLevel(add_prefix_space=False), None),
        ("prefix", pre_tokenizers.Metaspace(prepend_scheme="first"), None),
        (
            "whole",
            None,
            normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        ),
    ]:
        tokenizer = Tokenizer(models.BPE(byte_fallback=name != "bytes"))
        tokenizer.decoder = decoders.ByteLevel()
        if pre:
            tokenizer.pre_tokenizer = pre
        if normalizer:
            tokenizer.normalizer = normalizer
        words = [*LINES[:100], "\n\n\n\n", "a\n\nb", "   \n  "]
        special = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256))] if name != "bytes" else ["<s>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet() if name == "bytes" else []
        trainer = trainers.BpeTrainer(
            vocab_size=800, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(words, trainer)
        made[name] = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return made


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """Lengths of the pieces that the tokenizer gets."""
    lengths = []

    def noted(tokenizer, text: str) -> list[int]:
        lengths.append(len(text))
        return WHOLE(tokenizer, text)

    monkeypatch.setattr(tokenizing, "_ids", noted)
    return lengths


@pytest.mark.parametrize("kind", ["bytes", "prefix", "whole"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_have_the_ids_of_the_whole(tokenizers, asked, monkeypatch, kind, text):
    monkeypatch.setattr(tokenizing, "PIECE_CHARACTERS", 500)
    monkeypatch.setattr(tokenizing, "LONGEST", 8000)
    tokenizer, content = tokenizers[kind], TEXTS[text]
    found, expected = tokenizing.encode(tokenizer, content), WHOLE(tokenizer, content)
    assert max(asked) < 8000 + 10 and len(asked) > 1
    if text in ("no space", "nothing but spaces"):  # cut where it is: no more than the tokens there differ
        assert abs(len(found) - len(expected)) < 60
    else:
        assert found == expected
    assert tokenizing.encode(tokenizer, content, 77) == found[:77]


def test_a_limit_reads_no_more_than_it_needs(tokenizers, asked):
    tracemalloc.start()
    try:
        assert len(tokenizing.encode(tokenizers["bytes"], "Ba da. " * 1_000_000, 512)) == 512
        assert len(tokenizing.encode(tokenizers["bytes"], "Ba da.\n" * 1_000_000, 512)) == 512
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert sum(asked) < 2 * tokenizing.LONGEST


def _changed(folder, **parts):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return open_checkpoint(str(folder))


@pytest.mark.parametrize(
    "normalizer, fits",
    [
        ({"type": "NFKC"}, True),
        ({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, True),
        ({"type": "Replace", "pattern": {"String": "a" * 10}, "content": "b" * 100}, True),
        ({"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 100}, False),
        ({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "b" * 100}, False),
        ({"type": "Prepend", "prepend": "▁"}, True),
        (
            {
                "type": "Sequence",
                "normalizers": 3 * [{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaa"}],
            },
            False,
        ),
    ],
)
def test_a_normalizer_that_multiplies_text_is_refused(tiny_model, normalizer, fits):
    checkpoint = _changed(tiny_model("llama", tokenizer=True), normalizer=normalizer)
    if fits:
        assert checkpoint.tokenizer("a")["input_ids"]
        return
    with pytest.raises(QuantkitError, match=r"tokenizer makes up to [\d,]+ characters of one") as raised:
        checkpoint.tokenizer  # noqa: B018
    assert raised.value.exit_code == UNSUPPORTED


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda model: model.update(continuing_subword_prefix="e"), "merges without its continuing_subword_"),
        (lambda model: model["vocab"].update(C=2**31), "gives a token the id 2147483648"),
    ],
)
def test_a_file_that_would_abort_the_process_is_refused(tiny_model, change, said):
    folder = tiny_model("llama", tokenizer=True)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content["model"])
    with pytest.raises(QuantkitError, match=said) as raised:
        _ = _changed(folder, **content).tokenizer
    assert raised.value.exit_code == UNSUPPORTED


def test_a_panic_of_the_library_is_a_line():
    """Its exception is no Exception; others that are none, such as an interrupt, stay what they are."""
    PanicException = type("PanicException", (BaseException,), {})

    def panics(*_, **__):
        raise PanicException("Onig: Regex search error: retry-limit-in-match over")

    with pytest.raises(QuantkitError, match="^the model's tokenizer fails: Onig: Regex search"):
        tokenizing.encode(panics, "a")
    with pytest.raises(KeyboardInterrupt), tokenizing.explained():
        raise KeyboardInterrupt
    with pytest.raises(MemoryError), tokenizing.explained():
        raise MemoryError
