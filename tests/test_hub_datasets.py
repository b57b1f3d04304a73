"""Datasets of the hub, served by a stand-in: streamed, reproducible, and nothing asked of the hub offline."""

import gzip
import io
import json

import pyarrow
import pytest
from families import save_model, save_tokenizer, sentences
from pyarrow import parquet
from stand_in_hub import SHA, TOKEN, Elsewhere, Repo, StandInHub

from quantkit.errors import NOT_FOUND, UNSUPPORTED, USAGE

OLDER = "f" * 40
TEXTS = sentences(400, seed=6)
TALK = [{"role": "user", "content": "Wer da?"}, {"role": "assistant", "content": "Ich bin es."}]
SIZE = {"samples": 4, "seqlen": 64}


def table(**columns) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), buffer, row_group_size=100)
    return buffer.getvalue()


def rows(texts: list[str]) -> bytes:
    lines = "".join(json.dumps({"text": text, "url": "https://example.org"}) + "\n" for text in texts)
    return gzip.compress(lines.encode(), mtime=0)


def card(**configs: dict[str, str]) -> bytes:
    """A README.md that says which files make up which split of which config, as the real ones do."""
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config.replace('_', '-')}", "  data_files:"]
        lines += [
            line for split, path in splits.items() for line in (f"  - split: {split}", f"    path: {path}")
        ]
    return "\n".join([*lines, "---", "# A dataset", ""]).encode()


def fill(hub: StandInHub) -> None:
    plain = {
        "data/train-00000-of-00002.parquet": table(text=TEXTS[:200], body=TEXTS[200:]),
        "data/train-00001-of-00002.parquet": table(text=TEXTS[200:], body=TEXTS[:200]),
        "data/test-00000-of-00001.parquet": table(text=TEXTS[:5], body=TEXTS[:5]),
    }
    older = {"train.parquet": table(text=TEXTS[::-1])}
    hub.repos["datasets/org/data"] = Repo({SHA: plain, OLDER: older}, {"main": SHA, "v1": OLDER})
    hub.add("datasets/org/private", plain, "private")
    hub.add("datasets/org/gated", plain, "gated")
    hub.add("datasets/org/broken", plain, "broken")
    hub.add("datasets/org/script", {"script.py": b"raise SystemExit('run!')", **plain})
    hub.add("datasets/org/damaged", {"train.jsonl": b"not JSON"})
    hub.add("datasets/org/chat", {"train.jsonl": json.dumps({"id": 1, "messages": TALK}).encode()})
    wikitext = {
        "README.md": card(
            wikitext_103_raw_v1={"train": "wikitext-103-raw-v1/train-*"},
            wikitext_2_raw_v1={"test": "wikitext-2-raw-v1/test-*", "train": "wikitext-2-raw-v1/train-*"},
        ),
        "wikitext-103-raw-v1/train-00000-of-00001.parquet": table(text=["not this one"]),
        "wikitext-2-raw-v1/test-00000-of-00001.parquet": table(text=["nor this"]),
        "wikitext-2-raw-v1/train-00000-of-00001.parquet": table(text=[text + "\n" for text in TEXTS]),
    }
    hub.add("datasets/Salesforce/wikitext", wikitext)
    c4 = {
        "README.md": card(en={"train": "en/c4-train.*.json.gz", "validation": "en/c4-validation.*.json.gz"})
    }
    c4 |= {f"en/c4-train.{k:05d}-of-00008.json.gz": rows(sentences(700, seed=k)) for k in range(8)}
    c4["en/c4-validation.00000-of-00001.json.gz"] = rows(["not this"])
    hub.add("datasets/allenai/c4", c4)


@pytest.fixture(scope="module")
def hub():
    with StandInHub() as server:
        fill(server)
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("models") / "llama", "llama")
    save_tokenizer(folder)
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def process(hub, model, tmp_path_factory):
    """One process for all tests of this file: importing torch takes longer than all they do."""
    with Elsewhere(tmp_path_factory.mktemp("home"), hub.url) as other:
        yield other


@pytest.fixture
def calibrate(hub, model, process):
    hub.forget()

    def calibrate(source: str, **options) -> dict:
        return process.ask(do="calibrate", model=str(model), calibration=source, **SIZE | options)

    return calibrate


@pytest.mark.parametrize(
    "named, name, text",
    [
        ("wikitext2", "Salesforce/wikitext@wikitext-2-raw-v1:test:text", "nor this"),
        ("c4", "allenai/c4@en:validation:text", "not this"),
        ("org/data:test", "org/data@default:test:text", "\n\n".join(TEXTS[:5])),
        ("org/data:test:body", "org/data@default:test:body", "\n\n".join(TEXTS[:5])),
    ],
)
def test_a_text_to_evaluate_on_is_a_split_that_no_calibration_reads(process, named, name, text):
    """In the order of the dataset: a perplexity depends on it."""
    assert process.ask(do="held_out", text=named) == {"name": name, "text": text}


def test_conversations_to_evaluate_on_are_rendered_and_a_missing_file_is_refused(process):
    assert process.ask(do="held_out", text="org/chat:train:messages")["text"] == str(TALK)
    assert process.ask(do="held_out", text="nothing.txt")["code"] == 3


@pytest.fixture
def decode(model):
    from quantkit.models.files.open import open_checkpoint

    tokenizer = open_checkpoint(str(model)).tokenizer
    return lambda answer: tokenizer.decode([token for row in answer["tokens"] for token in row])


def sentences_in(text: str) -> list[str]:
    """Whole sentences of a text in which they follow each other without a space."""
    return [sentence + "." for sentence in text.split(".")[:-1]]


# Online


def test_a_split_and_a_column_are_streamed_and_recorded(hub, calibrate, decode):
    found = calibrate("org/data:train:text")
    assert found["dataset"] == {
        "repo": "org/data",
        "config": "default",
        "split": "train",
        "column": "text",
        "revision": SHA,
    }
    assert found["source"] == "org/data@default:train:text" and found["chat_template"] is None
    assert set(sentences_in(decode(found))) <= set(TEXTS)
    assert hub.fetched("test-00000-of-00001.parquet") == set()
    assert calibrate("org/data") == found  # text of train is what one gets
    assert calibrate("org/data", seed=1)["sha256"] != found["sha256"]
    other = calibrate("org/data:test:body", samples=1, seqlen=16)
    assert set(sentences_in(decode(other))) <= set(TEXTS[:5])


def test_a_revision_is_resolved_to_its_commit(calibrate):
    tagged, pinned, main = (
        calibrate("org/data", calibration_revision=name) for name in ("v1", OLDER, "main")
    )
    assert tagged == pinned and tagged["dataset"]["revision"] == OLDER
    assert main["dataset"]["revision"] == SHA and main["sha256"] != tagged["sha256"]
    error = calibrate("org/data", calibration_revision="v9")
    assert error["message"] == "the hub has no dataset org/data at revision v9, or it is private"


def test_wikitext2_is_text_whose_lines_stay_together(hub, calibrate, decode):
    found = calibrate("wikitext2", samples=1)  # one piece
    assert found["dataset"] == {
        "repo": "Salesforce/wikitext",
        "config": "wikitext-2-raw-v1",
        "split": "train",
        "column": "text",
        "revision": SHA,
    }
    assert decode(found) in "".join(text + "\n" for text in TEXTS) * 2  # a passage of it, as it stands there
    assert not any("103" in path for path in hub.sent)


def test_c4_is_streamed_and_never_fetched_whole(hub, calibrate, decode):
    found = calibrate("c4")
    assert found["dataset"]["repo"] == "allenai/c4" and found["dataset"]["config"] == "en"
    known = {text for k in range(8) for text in sentences(700, seed=k)}
    assert set(sentences_in(decode(found))) <= known
    files = hub.fetched(".json.gz")
    assert 1 <= len(files) <= 4 < 8
    assert not any("validation" in path for path in files)


def test_conversations_of_a_dataset_go_through_the_template(calibrate, decode):
    found = calibrate("org/chat", samples=1, seqlen=16)
    assert "[user] Wer da?[assistant] Ich".startswith(decode(found)[:12])
    assert len(found["chat_template"]) == 64 and found["dataset"]["column"] == "messages"


@pytest.mark.nightly
def test_a_private_dataset_needs_the_token_of_the_environment(hub, model, calibrate, tmp_path):
    refused = calibrate("org/private")
    assert refused["message"] == "the hub has no dataset org/private, or it is private"
    assert refused["code"] == NOT_FOUND and "HF_TOKEN" in refused["hint"]
    assert {token for *_, token in hub.seen} == {None}
    hub.forget()
    with Elsewhere(tmp_path, hub.url, TOKEN) as other:
        for repo in ("org/private", "org/gated"):
            found = other.ask(do="calibrate", model=str(model), calibration=repo, **SIZE)
            assert found["dataset"]["repo"] == repo and TOKEN not in json.dumps(found)
        lost = other.ask(do="calibrate", model=str(model), calibration="org/broken", **SIZE)
        assert lost["code"] == NOT_FOUND and TOKEN not in json.dumps(lost)
    assert {token for *_, token in hub.seen} == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    ("source", "message", "hint", "code"),
    [
        ("org/absent", "the hub has no dataset org/absent, or it is private", "spelling", NOT_FOUND),
        ("org/gated", "org/gated is gated", "accept its terms", NOT_FOUND),
        ("org/broken", "org/broken is not a local file and could not be fetched", "hf download", NOT_FOUND),
        (
            "org/data:dev",
            "dataset org/data: Bad split: dev. Available splits: ['train', 'test']",
            "org/data@CONFIG:SPLIT:COLUMN",
            USAGE,
        ),
        (
            "org/data:train:nope",
            "dataset org/data has no column 'nope' (it has: text, body)",
            "org/data:train:COLUMN",
            USAGE,
        ),
        ("org/data@en", "dataset org/data: BuilderConfig 'en' not found", "org/data@CONFIG", USAGE),
        (
            "Salesforce/wikitext",
            "dataset Salesforce/wikitext: Config name is missing",
            "Salesforce/wikitext@CONFIG",
            USAGE,
        ),
        ("org/script", "dataset org/script cannot be read: Dataset scripts", "data files", UNSUPPORTED),
        ("org/damaged", "dataset org/damaged cannot be read: JSON parse error", "data files", UNSUPPORTED),
    ],
)
def test_what_cannot_be_had_is_an_error_with_a_way_out(calibrate, source, message, hint, code):
    error = calibrate(source)
    assert error["message"].startswith(message)
    assert hint in error["hint"] and error["code"] == code


def test_a_column_of_another_kind_is_an_error(hub, calibrate):
    hub.add("datasets/org/numbers", {"train.parquet": table(text=[1, 2])})
    error = calibrate("org/numbers")
    assert error["message"] == "org/numbers:train, row 1 read has no text under 'text' (it has: text: int)"


@pytest.mark.nightly
def test_a_hub_that_cannot_be_reached_is_an_error(model, tmp_path):
    with Elsewhere(tmp_path, "http://127.0.0.1:9") as other:
        error = other.ask(do="calibrate", model=str(model), calibration="org/data", **SIZE)
    assert error["message"].startswith("org/data is not a local file and could not be fetched: ")
    assert error["code"] == NOT_FOUND and "hf download org/data --repo-type dataset" in error["hint"]


# Offline


def test_offline_a_downloaded_dataset_gives_the_same_tokens_without_a_request(hub, calibrate, process):
    online = calibrate("org/data")
    absent = calibrate("org/data", offline=True)  # to stream it has left nothing behind
    assert absent["message"] == "dataset org/data is not in the local cache"
    assert absent["code"] == NOT_FOUND and "hf download org/data --repo-type dataset" in absent["hint"]
    process.ask(do="download", repo="org/data")
    hub.forget()
    assert calibrate("org/data", offline=True) == online
    assert "Bad split: dev" in calibrate("org/data:dev", offline=True)["message"]
    assert "'en' not found" in calibrate("org/data@en", offline=True)["message"]
    assert (
        "not in the local cache" in calibrate("org/data", calibration_revision="v1", offline=True)["message"]
    )
    assert not hub.seen


def test_offline_a_part_of_c4_will_do(hub, calibrate, process):
    process.ask(do="download", repo="allenai/c4", patterns=["README.md", "en/*.00000-of-*"])
    assert len(hub.fetched("json.gz")) == 2
    hub.forget()
    found = calibrate("c4", offline=True)
    assert found["dataset"]["revision"] == SHA and len(found["tokens"]) == 4
    assert not hub.seen
