"""Calibration text becomes token sequences: every token accounted for, seeded, and traceable."""

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import chats
import pytest
import torch
from families import sentences

from quantkit.errors import NOT_FOUND, UNSUPPORTED, USAGE, QuantkitError
from quantkit.evaluation import generate, self_text, windows
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.options import CalibrationOptions
from quantkit.text import calibration, shipped_folder, sources
from quantkit.text.calibration import CalibrationSet
from quantkit.text.sources import TOKEN_CHARS, open_source

SHORT = " ".join(sentences(100, seed=1)) + "\n"
LONG = "\n".join(sentences(2500, seed=2)) + "\n"


@pytest.fixture
def checkpoint(tiny_model):
    return open_checkpoint(str(tiny_model("llama", tokenizer=True)))


@pytest.fixture
def in_one_piece(monkeypatch):
    """Texts stay whole, so that their tokens have a known order."""
    monkeypatch.setattr(sources, "TOKEN_CHARS", 10**6)


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes, name: str = "text.txt") -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def load(checkpoint: Checkpoint, path: str | None = None, **options) -> CalibrationSet:
    return calibration.load(checkpoint, CalibrationOptions(calibration=path, **options))


def error_of(checkpoint: Checkpoint, path: str, **options) -> QuantkitError:
    with pytest.raises(QuantkitError) as caught:
        load(checkpoint, path, **options)
    return caught.value


def encode(checkpoint: Checkpoint, text: str) -> list[int]:
    """Tokens of a text, straight from the tokenizers library."""
    return checkpoint.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def jsonl(texts, **more) -> str:
    return "".join(json.dumps({"text": text, **more}, ensure_ascii=False) + "\n" for text in texts)


# Slicing


@pytest.mark.usefixtures("in_one_piece")
def test_a_text_is_concatenated_and_sliced(checkpoint, write):
    stream = encode(checkpoint, SHORT)
    assert checkpoint.tokenizer.decode(stream) == SHORT
    found = load(checkpoint, write(SHORT), samples=5, seqlen=64)
    assert found.tokens.dtype == torch.int64
    assert found.tokens.tolist() == [stream[64 * k : 64 * (k + 1)] for k in range(5)]
    assert found.warning is None


@pytest.mark.usefixtures("in_one_piece")
def test_rows_are_concatenated_without_separator_in_seeded_order(checkpoint, write):
    rows = sentences(8, seed=3)
    found = load(checkpoint, write(jsonl(rows), "rows.jsonl"), samples=10**6, seqlen=2, seed=4)
    stream = found.tokens.flatten().tolist()
    left = {k: encode(checkpoint, row) for k, row in enumerate(rows)}
    order = []
    while len(stream) > 1:  # the last token may be missing
        (here,) = [k for k, ids in left.items() if ids[: len(stream)] == stream[: len(ids)]]
        order.append(here)
        stream = stream[len(left.pop(here)) :]
    assert not left and order != sorted(order)


def test_a_long_text_is_cut_at_line_ends_and_loses_nothing(checkpoint, write):
    found = load(checkpoint, write(LONG), samples=10**6, seqlen=100)
    decoded = checkpoint.tokenizer.decode(found.tokens.flatten())
    assert 0 <= len(LONG) - len(decoded) < 1000  # less than a sequence is left out at the end
    assert set(decoded.splitlines()[:-1]) <= set(LONG.splitlines())
    assert decoded != LONG[: len(decoded)]


@pytest.mark.parametrize(("name", "glue"), [("text.txt", " "), ("rows.jsonl", " "), ("text.txt", "")])
def test_a_long_text_without_lines_is_cut_as_well(write, name, glue):
    """At words if there are any; else the seed would choose nothing, and all would come from one place."""
    text = glue.join(f"w{k:04}" for k in range(1000))
    path = write(jsonl([text]) if name == "rows.jsonl" else text, name)
    orders = [list(open_source(CalibrationOptions(path, seed=seed), True, 50).documents) for seed in (0, 1)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert all(piece in text and len(piece) <= 400 for piece in orders[0])
    assert sum(map(len, orders[0])) == len(text) and len(orders[0]) > 10
    assert not glue or all(len(piece) % 6 in (0, 5) for piece in orders[0])  # whole words


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(checkpoint, write):
    path = write(LONG)
    first, again, other = (load(checkpoint, path, samples=4, seqlen=128, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(first.tokens, again.tokens)
    assert first.provenance == again.provenance
    assert not torch.equal(first.tokens, other.tokens)
    assert first.provenance.sha256 != other.provenance.sha256


@pytest.mark.usefixtures("in_one_piece")
@pytest.mark.parametrize("name", [None, "text.txt", "rows.jsonl"])
def test_every_sequence_begins_with_bos_where_the_tokenizer_says_so(tiny_model, write, name):
    checkpoint = open_checkpoint(str(tiny_model("llama", tokenizer="bos")))
    content = jsonl([SHORT]) if name == "rows.jsonl" else SHORT
    found = load(checkpoint, name and write(content, name), samples=6, seqlen=64)
    assert found.tokens.shape == (6, 64)
    assert found.tokens[:, 0].tolist() == [0] * 6
    assert found.tokens[:, 1:].min() > 0  # and nothing else is BOS
    assert found.provenance.bos
    if name:
        assert found.tokens[:, 1:].flatten().tolist() == encode(checkpoint, SHORT)[: 6 * 63]


def test_the_provenance_names_the_tokens(checkpoint, write):
    path = write(LONG, "corpus.txt")
    found = load(checkpoint, path, samples=3, seqlen=100, seed=5)
    block = b"".join(
        token.to_bytes(8, "little", signed=True) for row in found.tokens.tolist() for token in row
    )
    assert found.record() == {
        "source": "corpus.txt",
        "samples": 3,
        "seqlen": 100,
        "seed": 5,
        "bos": False,
        "sha256": hashlib.sha256(block).hexdigest(),
        "chat_template": None,
        "dataset": None,
    }


# Lengths


@pytest.mark.parametrize(
    ("context", "asked", "of_a_file", "of_the_shipped"),
    [(4096, None, 2048, 512), (256, None, 256, 256), (256, 300, 256, 256), (256, 100, 100, 100)],
)
def test_the_length_of_sequences(tiny_model, write, context, asked, of_a_file, of_the_shipped):
    checkpoint = open_checkpoint(str(tiny_model("llama", tokenizer=True, max_position_embeddings=context)))
    own, shipped = (load(checkpoint, path, samples=2, seqlen=asked) for path in (write(LONG), None))
    assert own.tokens.shape == (2, own.provenance.seqlen) == (2, of_a_file)
    assert shipped.tokens.shape == (2, shipped.provenance.seqlen) == (2, of_the_shipped)


def test_a_model_without_a_limit_takes_any_length(tiny_model, write):
    checkpoint = open_checkpoint(str(tiny_model("bloom", tokenizer=True)))
    assert load(checkpoint, write(LONG), samples=1, seqlen=5000).tokens.shape == (1, 5000)


@pytest.mark.usefixtures("in_one_piece")
def test_too_little_text_is_used_and_announced(checkpoint, write):
    stream = encode(checkpoint, SHORT)
    whole = len(stream) // 100
    assert len(stream) % 100 and 5 < whole < 60
    found = load(checkpoint, write(SHORT), samples=60, seqlen=100)
    assert found.tokens.flatten().tolist() == stream[: whole * 100]
    assert found.provenance.samples == whole
    assert found.warning == (
        f"calibration text text.txt holds {len(stream):,} tokens; 60 sequences of 100 need 6,000: "
        f"using {whole} sequences"
    )


@pytest.mark.parametrize(("text", "count"), [("Ein Satz.", None), ("\n", 1)])
def test_less_than_one_sequence_is_an_error(checkpoint, write, text, count):
    count = len(encode(checkpoint, text)) if count is None else count
    tokens = "1 token" if count == 1 else f"{count} tokens"
    error = error_of(checkpoint, write(text), samples=2, seqlen=64)
    assert error.message == f"calibration text text.txt holds {tokens}; one sequence needs 64"
    assert error.exit_code == USAGE and "--seqlen" in error.hint
    error = error_of(checkpoint, write(""), samples=2, seqlen=64)
    assert error.message == "calibration text text.txt is empty" and "--seqlen" not in error.hint


@pytest.mark.parametrize(
    ("option", "size"), [("samples", 0), ("samples", -1), ("seqlen", 1), ("seqlen", 0), ("seqlen", -5)]
)
def test_sizes_that_make_no_sequence_are_errors(checkpoint, write, option, size):
    error = error_of(checkpoint, write(SHORT), **{option: size})
    assert error.exit_code == USAGE and error.message == "--samples must be 1 or more, --seqlen 2 or more"


def test_every_warning_is_kept(checkpoint, write):
    longest = checkpoint.context
    found = load(checkpoint, write(LONG), samples=10**6, seqlen=longest + 1)
    assert f"is cut to the model's context, {longest} tokens; calibration text" in found.warning


# Files


@pytest.mark.usefixtures("in_one_piece")
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson", "rows.json"])
def test_json_lines_give_the_text_under_a_key(checkpoint, write, name):
    path = write("\n" + jsonl([SHORT], title="not this") + "\n", name)
    found = load(checkpoint, path, samples=2, seqlen=64)
    assert found.tokens.flatten().tolist() == encode(checkpoint, SHORT)[:128]
    renamed = write(Path(path).read_text().replace('"text"', '"body"'), name)
    again = load(checkpoint, renamed, text_column="body", samples=2, seqlen=64)
    assert torch.equal(again.tokens, found.tokens)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"body": "x", "title": "y"}', "has no text under 'text' (it has: body, title)"),
        ('{"text": 5}', "has no text under 'text' (it has: text: int)"),
        ('["text"]', "has no text under 'text' (it has: list)"),
        ('{"text": "x"', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_row_without_text_is_named(checkpoint, write, line, words):
    path = write(jsonl(["good"]) + line + "\n", "rows.jsonl")
    error = error_of(checkpoint, path)
    assert error.message.startswith(f"{path}:2 {words}")
    assert error.exit_code == USAGE and error.hint


def test_half_of_a_surrogate_pair_is_the_rows_fault(checkpoint, write):
    error = error_of(checkpoint, write(jsonl(["good"]) + '{"text": "a\\ud800b"}\n', "rows.jsonl"), seqlen=8)
    assert "rows.jsonl:2 is not Unicode" in error.message and error.exit_code == USAGE


def test_a_missing_file_is_not_found(checkpoint, tmp_path):
    for path in (tmp_path / "absent.txt", tmp_path):
        error = error_of(checkpoint, str(path))
        assert error.exit_code == NOT_FOUND
        assert error.message.startswith(f"calibration text {path} cannot be read: ")


@pytest.mark.parametrize("name", ["text.txt", "rows.jsonl"])
def test_text_in_another_encoding_is_refused(checkpoint, write, name):
    path = write('{"text": "Grüße"}\n'.encode("latin-1"), name)
    error = error_of(checkpoint, path)
    assert error.exit_code == USAGE
    assert error.message.startswith(f"{path} is not UTF-8 text: ")


# The shipped text


def hangul(text: str) -> float:
    return sum("가" <= character <= "힣" for character in text) / len(text)


def shipped_texts() -> dict[str, str]:
    paths = shipped_folder("calibration").rglob("*.txt")
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def test_the_shipped_text_is_english_and_korean():
    sizes = {"english": 0, "korean": 0}
    for text in shipped_texts().values():
        sizes["korean" if hangul(text) > 0.5 else "english"] += len(text.encode())
    assert sizes["english"] >= 60_000
    assert sizes["korean"] >= 25_000


def test_the_shipped_text_shares_nothing_with_the_held_out_text():
    def fragments(text: str) -> set[str]:
        flat = " ".join(text.split())
        return {flat[start : start + 40] for start in range(len(flat) - 39)}

    held_out = fragments((Path(__file__).parents[1] / "heldout" / "heldout.txt").read_text(encoding="utf-8"))
    assert len(held_out) > 40_000
    assert {name: fragments(text) & held_out for name, text in shipped_texts().items()} == dict.fromkeys(
        shipped_texts(), set()
    )


def test_the_shipped_text_is_what_a_job_gets_by_default(demo_model):
    checkpoint = open_checkpoint(str(demo_model))
    found = load(checkpoint)
    assert found.provenance.source == "shipped"
    assert found.provenance.seqlen == 512 == found.tokens.shape[1]
    assert 100 <= found.provenance.samples == len(found.tokens) <= 128
    text = checkpoint.tokenizer.decode(found.tokens.flatten())
    assert 0.05 < hangul(text) < 0.5


def test_a_language_that_the_tokenizer_spells_is_left_out(checkpoint, demo_model):
    """It was 42 % of the tokens of SmolLM2, which loses an eighth less without it."""
    checkpoints = {"spells": checkpoint, "knows": open_checkpoint(str(demo_model))}
    tokens = {name: load(each, samples=10_000).tokens.flatten() for name, each in checkpoints.items()}
    texts = {name: each.tokenizer.decode(tokens[name]) for name, each in checkpoints.items()}
    assert hangul(texts["spells"]) == 0 < hangul(texts["knows"])
    assert "The Mekong" in texts["spells"]  # of the last file


def test_few_sequences_come_from_many_places():
    """Eight sequences were one piece of a file: all code, or all tables. They lost twice as much."""
    texts = shipped_texts()
    for seed in range(4):
        pieces = list(open_source(CalibrationOptions(seed=seed), True, 512).documents)
        assert all(len(piece) < 512 * TOKEN_CHARS + 2_000 for piece in pieces)
        assert sorted("".join(pieces)) == sorted("".join(texts.values()))
        origins = [next(name for name, text in texts.items() if piece in text) for piece in pieces]
        assert len(set(origins[:8])) >= 5
        main = [name for name in origins if not (shipped_folder("calibration") / "more" / name).exists()]
        for name in set(main):  # in proportion
            assert abs(main[: len(main) // 2].count(name) - main.count(name) / 2) <= 1.5


def test_few_sequences_come_from_all_long_rows(write):
    """Rows stay whole up to two sequences."""
    rows = [f"{name}\n" * 400 for name in "abcd"] + ["e\n" * 15]
    options = CalibrationOptions(str(write(jsonl(rows), "rows.jsonl")))
    documents = list(open_source(options, True, 2).documents)
    assert sorted("".join(documents)) == sorted("".join(rows))
    assert {piece[0] for piece in documents[:30]} >= set("abcd")
    assert {len(piece) for piece in documents} == {10}  # two tokens are 8 characters; cut at line ends
    whole = list(open_source(options, True, 4).documents)
    assert [len(piece) for piece in whole if piece[0] == "e"] == [30]


def test_the_further_text_comes_after_the_rest():
    """A job with fewer samples calibrates on the same tokens, whatever is shipped for more."""
    documents = list(open_source(CalibrationOptions(), True, 512).documents)
    further = "".join(path.read_text() for path in shipped_folder("calibration/more").glob("*.txt"))
    last = [document in further for document in documents]
    assert any(last)
    assert last == sorted(last)


NOTE = "<|note|>"


def test_a_token_beyond_the_embedding_is_one_error_before_any_work(checkpoint, write):
    """A fine-tune added it to the tokenizer and not to the model: its first use was a traceback."""
    tokenizer, path = checkpoint.tokenizer, write(NOTE.join(sentences(100)))
    tokenizer.add_tokens([NOTE], special_tokens=True)
    tokenizer.save_pretrained(checkpoint.folder)
    harness = SimpleNamespace(model=SimpleNamespace(skeleton=SimpleNamespace(checkpoint=checkpoint)))
    harness.tokenizer = tokenizer
    chat = chats.begin(checkpoint.folder, raw=True)
    readers = [
        lambda: load(checkpoint, path, samples=2, seqlen=32),
        lambda: windows.load(checkpoint, Path(path), 32, None, None),
        lambda: generate.encode(checkpoint, generate.GenerateSettings(prompt=f"Kobu{NOTE}")),
        lambda: chat.say(f"Kobu{NOTE}", chats.silent),
    ]
    if find_spec("lm_eval"):
        from quantkit.evaluation.tasks.harness import HarnessModel

        readers.append(lambda: HarnessModel.tok_encode(harness, f"Kobu{NOTE}"))
    tokenizer.bos_token = NOTE
    readers.append(lambda: self_text.beginning(checkpoint, ""))
    for read in readers:
        with pytest.raises(QuantkitError) as caught:
            read()
        says = f"the text holds '<|note|>', id 512: the embedding of {checkpoint.source} has 512 rows"
        assert (caught.value.message, caught.value.exit_code) == (says, UNSUPPORTED)
