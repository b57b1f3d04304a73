"""quantkit report: the page in a parser, and the command around it."""

import errno
import html.parser
import json
import os
import re
import xml.etree.ElementTree as ElementTree

import families
import pytest
import records
from records import NASTY

from quantkit.errors import NOT_FOUND, RESOURCES, USAGE
from quantkit.evaluation.comparison import drawing, figures, report, table


@pytest.fixture
def result(tmp_path):
    """A file as quantkit eval --json leaves it."""
    path = tmp_path / "result.json"
    path.write_text(json.dumps(records.record()))
    return path


class Page(html.parser.HTMLParser):
    """Everything a browser would fetch or run, the visible text, and whether tags are closed."""

    VOID = {"meta"}

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.references, self.text, self.open = [], [], "", []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.open += [] if tag in self.VOID else [tag]
        for key, value in attributes:
            if key.startswith("on") or key in ("src", "href", "srcset", "data", "action", "xlink:href"):
                self.references.append((tag, key, value))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_self_contained_and_says_it_all():
    gate = {"metric": "kld.mean", "op": "<=", "limit": 0.05, "model": "out/three", "value": 0.08}
    record = records.record(gates=[gate | {"pass": False}])
    text = table.report(record).page()
    found = Page(text)
    assert not set(found.tags) & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert all(value.startswith("#") for *_, value in found.references)
    urls = set(re.findall(r"https?://[^\"' )]+|url\((?!#)|@import", text))
    assert urls == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names of formats
    for words in (
        "base against four, three",
        "gate FAILED: KL divergence of three is 0.08",
        "0.08000",
        "+0.500 ± 0.050",
    ):
        assert words in found.text
    for value in (record["data"]["sha256"], record["data"]["tokenizer"], "2.13.0"):
        assert value in found.text
    assert text.count("<svg") == 2 and len(text) < 100_000
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


def test_names_cannot_break_out():
    record = records.record(records.model("base", 9), records.model(NASTY, 5, 0.1), text=NASTY, dtype=NASTY)
    record["env"][NASTY] = NASTY
    record["gates"] = [
        {"metric": "top1", "op": ">=", "limit": 0.5, "model": NASTY, "value": 0.9, "pass": True},
        {"metric": "top1", "op": ">=", "limit": 0.5, "model": "nobody" + NASTY, "value": 0.9, "pass": True},
    ]
    text = table.report(record).page()
    found = Page(text)
    assert "script" not in found.tags
    assert all(value.startswith("#") for *_, value in found.references)
    shown = (
        "<script>alert(1)</script>\"'&amp;\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} ]]> --> $x_1$"
    )
    assert shown in found.text
    text.encode("utf-8")
    for figure in table.report(record).figures:
        ElementTree.fromstring(drawing.document(figure))


def test_the_command_writes_page_and_plots(quantkit, result, tmp_path):
    done = quantkit("report", result, "-o", "a.html", "--png")
    assert done == (0, "wrote a.html\nwrote a.png\n", "")
    assert (tmp_path / "a.html").read_text() == table.report(records.record()).page()
    assert quantkit("report", result, result, "-q") == (0, "", "")
    assert (tmp_path / "report.html").read_text() == table.report(records.record()).page()


@pytest.mark.parametrize("precious", ["report.html", "report.png"])
def test_an_existing_page_or_plot_stays_unless_overwritten(quantkit, result, tmp_path, precious):
    (tmp_path / precious).write_text("mine")
    code, out, err = quantkit("report", result, "--png")
    assert (code, out) == (USAGE, "") and err.startswith(f"error: {precious} exists\nhint: ")
    assert "--overwrite" in err and (tmp_path / precious).read_text() == "mine"
    done = quantkit("report", result, "--png", "--overwrite")
    assert done == (0, "wrote report.html\nwrote report.png\n", "")
    assert (tmp_path / precious).read_bytes() != b"mine"


def test_a_full_disk_leaves_no_part_of_a_page(quantkit, result, tmp_path, monkeypatch):
    def write_text(path, text, encoding):
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(report.Path, "write_text", write_text)
    done = quantkit("report", result)
    assert done.code == RESOURCES and "report.html cannot be written: No space left on device" in done.err
    assert "hint: free some space" in done.err and not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere.json"], NOT_FOUND, "nowhere.json cannot be read"),
        (["nowhere.json", "-o", "no/folder.html"], USAGE, "no/folder.html"),
        (["nowhere.json", "-o", "."], USAGE, ". is a folder"),
    ],
)
def test_what_the_command_refuses(quantkit, arguments, code, words):
    found, out, err = quantkit("report", *arguments)
    assert (found, out) == (code, "") and err.startswith("error: ") and words in err and "\nhint: " in err


def test_other_formats_of_plots_are_refused_before_the_work(quantkit, tmp_path):
    code, _, err = quantkit("eval", tmp_path, "--text", "nowhere", "--plot", "a.pdf")
    assert code == USAGE and "a.pdf" in err


def test_eval_writes_the_same_page_at_once(quantkit, tiny_model, tmp_path):
    model = tiny_model("llama", tokenizer=True, hidden_size=64)
    (text := tmp_path / "text.txt").write_text("\n".join(families.sentences()))
    words = ["eval", model, "--as", "nf4", "--text", text, "--ctx", 32, "--limit", 300, "-q", "--json"]
    code, out, _ = quantkit(*words, "--html", "e.html", "--plot", "p.svg", "--max-kld", "0")
    record = json.loads(out)
    assert code == 7 and (tmp_path / "e.html").read_text() == table.report(record).page()
    assert [path.name for path in tmp_path.glob("p*.svg")] == ["p.svg"]
    assert (tmp_path / "p.svg").read_text() == drawing.document(figures.quality(record))


def test_a_page_never_takes_the_place_of_something_else(quantkit, tmp_path):
    """`-o result.json` would overwrite what was measured."""
    precious = tmp_path / "result.json"
    precious.write_text("{}")
    done = quantkit("report", precious, "-o", precious)
    assert done.code == 2 and "a page is .html" in done.err
    assert precious.read_text() == "{}"
