"""Documents of parquet files, and what `--calibration` may name."""

import csv
import json

import pyarrow
import pytest
from families import sentences
from pyarrow import parquet

from quantkit.errors import NOT_FOUND, USAGE, QuantkitError
from quantkit.options import CalibrationOptions
from quantkit.text import hub_datasets, sources
from quantkit.text.chat import ChatTemplate, Conversation
from quantkit.text.hub_datasets import Dataset
from quantkit.text.sources import BUFFER, TOKEN_CHARS, open_source

TEXTS = sentences(3000, seed=5)
SEQLEN = 64


@pytest.fixture
def write(tmp_path):
    def write(rows: int = 500, name: str = "rows.parquet", **columns) -> str:
        parquet.write_table(pyarrow.table(columns), tmp_path / name, row_group_size=rows)
        return str(tmp_path / name)

    return write


def documents(path: str | None, **options) -> list:
    return list(open_source(CalibrationOptions(calibration=path, **options), False, SEQLEN).documents)


def error_of(path: str | None, **options) -> QuantkitError:
    with pytest.raises(QuantkitError) as caught:
        documents(path, **options)
    return caught.value


def test_parquet_gives_every_row_once_in_seeded_order(write):
    path = write(text=TEXTS, id=list(range(len(TEXTS))))
    first, again, other = (documents(path, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
    assert sorted(first) == sorted(other) == sorted(TEXTS)
    assert first[:20] != TEXTS[:20]


def test_parquet_is_read_by_row_groups_and_batches_and_no_further_than_needed(write, monkeypatch):
    path = write(text=TEXTS, other=[text[::-1] for text in TEXTS])
    asked = []

    class Watched(parquet.ParquetFile):
        def iter_batches(self, batch_size, row_groups, columns):
            asked.append((row_groups, columns))
            for batch in super().iter_batches(batch_size, row_groups=row_groups, columns=columns):
                assert batch.num_rows <= BUFFER
                yield batch

    monkeypatch.setattr(parquet, "ParquetFile", Watched)
    opened = open_source(CalibrationOptions(calibration=path), False, SEQLEN).documents
    assert next(opened) in TEXTS
    assert 0 < len(asked) < len(TEXTS) / 500  # what the buffer holds, and one group more
    assert all(columns == ["text"] and len(groups) == 1 for groups, columns in asked)
    opened.close()


def test_a_large_row_group_is_read_in_batches(write):
    path = write(rows=len(TEXTS), text=TEXTS)
    assert parquet.ParquetFile(path).num_row_groups == 1
    assert sorted(documents(path)) == sorted(TEXTS)


def test_parquet_takes_the_column_it_is_told_and_passes_over_empty_rows(write):
    path = write(body=["a", None, "b", ""], text=["x"] * 4)
    assert sorted(documents(path, text_column="body")) == ["a", "b"]


def test_parquet_holds_conversations_and_long_texts(write):
    talk = [{"role": "user", "content": "hi"}]
    (found,) = documents(write(messages=[talk]))
    assert isinstance(found, Conversation) and found.messages == talk
    assert found.where.endswith("rows.parquet, row 1")
    long = "\n".join(TEXTS)
    pieces = documents(write(text=[long]))
    assert len(pieces) > 5 and max(map(len, pieces)) < SEQLEN * TOKEN_CHARS + 200
    assert sorted("".join(pieces)) == sorted(long)


def test_parquet_that_does_not_serve_is_an_error(write, tmp_path):
    path = write(body=["x"], number=[1])
    error = error_of(path)
    assert error.message == f"{path} has no text under 'text' (it has: body, number)"
    assert error.exit_code == USAGE and "--text-column" in error.hint
    assert error_of(path, text_column="number").message == (
        f"{path}, row 1 has no text under 'number' (it has: number: int)"
    )
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing PAR1")
    error = error_of(str(tmp_path / "bad.parquet"))
    assert error.exit_code == USAGE and "is not parquet that can be read" in error.message
    error = error_of(str(tmp_path / "absent.parquet"))
    assert error.exit_code == NOT_FOUND and "No such file" in error.message


PARTS = [{"type": "text", "text": "Wer da?"}]
ROWS = [
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, *PARTS]}], "tools": None},
    {"messages": [{"role": "user", "content": PARTS}], "tools": None},
]


class Tokenizer:
    """A vision model's template asks for keys; Arrow gives every part the keys of all parts."""

    special_tokens_map = {}

    def get_chat_template(self, given, tools):
        return "{% for m in messages %}{% for c in m.content %}{% if 'image' in c %}<i>{% else %}{{ c.text }}\
{% endif %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("name", ["c.parquet", "c.jsonl", "c.json", "c.csv", "c.tsv", "c.messages.parquet"])
def test_every_kind_of_file_gives_the_same_conversations(tmp_path, name):
    path, as_text = tmp_path / name, [{"messages": json.dumps(row["messages"])} for row in ROWS]
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(as_text if "messages" in name else ROWS), path)
    elif path.suffix in sources.CSV:
        with open(path, "w", newline="") as file:
            rows = csv.DictWriter(file, ["messages"], dialect=sources.CSV[path.suffix])
            rows.writeheader()
            rows.writerows(as_text)
    else:
        path.write_text(json.dumps(ROWS, indent=1) if name == "c.json" else "\n".join(map(json.dumps, ROWS)))
    template = ChatTemplate(Tokenizer())
    assert sorted(template.render(talk) for talk in documents(str(path))) == ["<i>Wer da?", "Wer da?"]
    content = sources.held_out(path, template.render)
    assert content == (name, "<i>Wer da?\n\nWer da?")


def texts(path, column: str = "text") -> tuple[list[str], str]:
    """Calibration documents and held-out text of a file."""
    return documents(str(path), text_column=column), sources.held_out(path, str, column)[1]


def test_columns_of_csv_are_read_by_name_and_quotes_and_lines_inside_of_quotes_are_kept(tmp_path):
    path = tmp_path / "r.csv"
    long = "x" * 200_000
    path.write_text(f'\ufeffid,body,text\r\n1,"a, ""b""\nc",no\r\n2,,no\r\n3,{long},no\r\n', encoding="utf-8")
    found, content = texts(path, "body")
    assert [text for text in found if "x" not in text] == ['a, "b"\nc']  # no empty row
    assert "".join(text for text in found if "x" in text) == long  # in pieces
    assert content == f'a, "b"\nc\n\n\n\n{long}'
    path = tmp_path / "r.TSV"
    path.write_text("text\tid\na, b\t1\n")
    assert texts(path) == (["a, b"], "a, b")
    error = error_of(str(path), text_column="body")
    assert error.message == f"{path}:2 has no text under 'body' (it has: text, id)"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("id,text\n1,a\n2,b,c\n", "3 is not CSV: more fields than the 2 columns of its first line"),
        ('id,text\n1,"a" b\n', "2 is not CSV: ',' expected after '\"'"),
        ('id,text\n1,"a\n', "2 is not CSV: unexpected end of data"),
    ],
)
def test_csv_that_does_not_serve_is_an_error(tmp_path, content, words):
    (tmp_path / "r.csv").write_text(content)
    error = error_of(str(tmp_path / "r.csv"))
    assert error.message == f"{tmp_path}/r.csv:{words}" and "twice" in error.hint and error.exit_code == USAGE


def test_a_column_of_plain_text_is_refused(tmp_path):
    (tmp_path / "r.txt").write_text("text")
    error = error_of(str(tmp_path / "r.txt"), text_column="body")
    assert error.exit_code == USAGE and error.message == (
        f"--text-column body is for files with columns, {tmp_path}/r.txt is plain text"
    )
    assert "the shipped text is plain text" in error_of(None, text_column="body").message


def test_byte_order_marks(tmp_path):
    path = tmp_path / "r.txt"
    path.write_bytes("a\n".encode("utf-8-sig"))
    assert texts(path) == (["a\n"], "a\n")
    path.write_bytes("a\n".encode("utf-16"))
    error = error_of(str(path))
    assert error.message == f"{path} is UTF-16, not UTF-8 text" and "iconv -f UTF-16" in error.hint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("wikitext2", Dataset("Salesforce/wikitext", "wikitext-2-raw-v1", "train", "text")),
        ("c4", Dataset("allenai/c4", "en", "train", "text")),
        ("org/name", Dataset("org/name", None, "train", None)),
        ("org/name:train_sft:messages", Dataset("org/name", None, "train_sft", "messages")),
        ("org/na.me@20231101.ko", Dataset("org/na.me", "20231101.ko", "train", None)),
        ("org/name@en:dev:my text", Dataset("org/name", "en", "dev", "my text")),
        ("name", None),
        ("./org/name", None),
        ("a/b/c", None),
        ("org/name:", None),
        ("org/name@", None),
        ("org/name:train[:10%]", None),
    ],
)
def test_ids_of_datasets(text, expected):
    assert hub_datasets.parse(text) == expected


@pytest.mark.parametrize("name", ["c4", "wikitext2", "org/name"])
def test_an_existing_path_wins_over_a_dataset(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("here")
    assert documents(name) == ["here"]


@pytest.mark.parametrize("name", ["data/train.jsonl", "data/text.txt", "data/rows.parquet", "nothing"])
def test_a_missing_file_is_not_looked_for_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = error_of(name)
    assert error.exit_code == NOT_FOUND
    assert error.message == f"calibration text {name} cannot be read: No such file or directory"
    assert "wikitext2, c4" in error.hint


def test_a_revision_is_for_datasets(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "x"}))
    error = error_of(str(path), calibration_revision="main")
    assert error.exit_code == USAGE and "--calibration-revision" in error.message


def test_the_buffer_is_bounded():
    taken = 0

    def count():
        nonlocal taken
        for number in range(10 * BUFFER):
            taken = number + 1
            yield str(number)

    shuffled = sources._shuffled(count(), seed=1)
    first = [next(shuffled) for _ in range(50)]
    assert taken == BUFFER + 50
    assert first != sorted(first, key=int)
    assert sorted([*first, *shuffled], key=int) == [str(number) for number in range(10 * BUFFER)]


@pytest.mark.parametrize("part", [5, 700, 1 << 20])
def test_text_read_in_parts_gives_the_pieces_of_the_whole(tmp_path, monkeypatch, part):
    whole = "\n".join(TEXTS[:200]) + "x" * 900 + " ’" * 300
    path = tmp_path / "long.txt"
    path.write_text(whole, encoding="utf-8")
    monkeypatch.setattr(sources, "PART_CHARS", part)
    found = list(sources._text(path, 50))
    assert found == list(sources._cut(whole, 50)) and "".join(found) == whole
