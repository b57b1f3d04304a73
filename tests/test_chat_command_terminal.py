"""What people type into a conversation, what they read, and what Ctrl-C does."""

import io
import json
import math
import os
import signal

import pytest
from chats import SAID, begin, silent

from quantkit.cli import chat_terminal, streams
from quantkit.errors import QuantkitError
from quantkit.evaluation.sampling import Sampling
from quantkit.models.files.open import open_checkpoint
from quantkit.options import CalibrationOptions
from quantkit.serving.chat import start
from quantkit.serving.chat.session import Answer, ChatSession
from quantkit.serving.chat.settings import ChatSettings
from quantkit.serving.engines import EngineFacts
from quantkit.text import calibration

# ---- files and commands


def written(text: str, during=lambda letter: None) -> ChatSession:
    """A raw conversation with an engine that always answers with this text."""
    return ChatSession(Written(text, during), Sampling(), raw=True)


def test_what_is_saved_is_calibrated_on(talker, tmp_path, capsys):
    path, folder = tmp_path / "talk.jsonl", talker()
    session = begin(folder, system="Ko.")
    first = session.say(SAID[0], silent)
    assert chat_terminal.Terminal(session).take(f"/save {path}")
    assert capsys.readouterr().err == f"saved to {path}\n"
    session.say(SAID[1], silent)
    session.save(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[1] == {"messages": [{"role": "system", "content": "Ko."}, *session.messages]}
    assert rows[0]["messages"] == [
        {"role": "system", "content": "Ko."},
        {"role": "user", "content": SAID[0]},
        {"role": "assistant", "content": first.text},
    ]
    checkpoint = open_checkpoint(str(folder))
    found = calibration.load(checkpoint, CalibrationOptions(calibration=str(path), samples=1, seqlen=24))
    rendered = checkpoint.tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False)
    ids = checkpoint.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert found.tokens[0].tolist() == ids[:24]


def test_what_cannot_be_saved_is_a_line(tmp_path):
    talk = written("")
    with pytest.raises(QuantkitError, match="the conversation is empty"):
        talk.save(tmp_path / "talk.jsonl")
    talk.say("x", silent)
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("folder.jsonl", "a\0b.jsonl", "\ud800.jsonl"):
        with pytest.raises(QuantkitError, match="cannot be written"):
            talk.save(tmp_path / name)
    (tmp_path / "model.gguf").write_text("mine")
    with pytest.raises(QuantkitError, match="is not a .jsonl file"):
        talk.save(tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_text() == "mine"


def test_messages_of_several_lines_stand_between_quotes(monkeypatch):
    lines = ["one", '"""', "two", "", "three", '"""', '"""four"""', '"""five', "six"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    terminal = chat_terminal.Terminal(written(""))
    assert list(terminal.messages()) == ["one", "two\n\nthree", "four", "five\nsix"]


def test_sampling_is_as_recommended_unless_asked_otherwise():
    recommended = {"temperature": 0.6, "top_k": 20.0, "top_p": 0.95}

    def chosen(known, **asked) -> Sampling:
        return start.chosen_sampling(ChatSettings(tokens=8, **asked), known)

    assert chosen(recommended) == Sampling(8, 0.6, 0, 20, 0.95)
    assert chosen(recommended, top_k=5) == Sampling(8, 0.6, 0, 5, 0.95)
    assert chosen(recommended, temperature=0.0) == Sampling(8)
    assert chosen(recommended | {"top_k": math.inf, "top_p": math.nan}) == Sampling(8, 0.6)
    assert chosen({}, seed=3) == Sampling(8, seed=3)
    with pytest.raises(QuantkitError, match="for sampling"):
        chosen({}, top_k=5)


# ---- the command


@pytest.fixture
def pipe(quantkit, monkeypatch):
    """`pipe("Hello\\n", folder, ...)`: what the command makes of stdin."""

    def run(text: str, *arguments):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return quantkit("chat", *arguments)

    return run


def test_a_line_of_json_per_answer(talker, pipe):
    folder = talker()
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.7}))
    done = pipe(f"{SAID[0]}\n\n/system Ko.\n//x\n/retry\n/exit\nnever\n", folder, "--json", "-q", "-n", 6)
    assert (done.code, done.err) == (0, "")
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [row["said"] for row in rows] == [SAID[0], "/x", "/retry"]
    assert [row["schema"] for row in rows] == ["quantkit.chat/2"] * 3
    assert [row["sampling"]["seed"] for row in rows] == [0, 1, 2] and rows[0]["sampling"][
        "temperature"
    ] == 0.7
    tokens = rows[2]["tokens"]
    assert tokens["cached"] + tokens["prefilled"] == tokens["prompt"] == rows[1]["tokens"]["prompt"]
    assert rows[0]["memory_bytes"]["kv_cache"] > 0 and rows[0]["model"]["context"] == 256


def test_what_is_printed(talker, pipe, monkeypatch):
    folder = talker()
    done = pipe(f"{SAID[0]}\n/reset\n", folder, "-n", 6, "--dtype", "float32")
    text = begin(folder, tokens=6).say(SAID[0], silent).text
    assert done.out == text + "\n"
    assert "float32 on cpu, 256 tokens of context; the likeliest token" in done.err
    assert " prefilled " in done.err and "KV cache" in done.err and "started again" in done.err


def test_answers_cannot_steer_the_terminal(capsys, monkeypatch):
    assert chat_terminal.Terminal(written("a\x1b[31mb\x9bc"), quiet=True).take("x")
    assert capsys.readouterr().out == "a\ufffd[31mb\ufffdc\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("-n 0", 2, "-n 0 is invalid"),
        ("--temperature nan", 2, "--temperature nan"),
        ("--threads -1", 2, "--threads -1 is invalid"),
        ("--ctx none", 2, "--ctx none is invalid"),
        ("--kv-dtype q8_0", 4, "--kv-dtype is for GGUF files"),
        ("--engine llama.cpp", 4, "llama.cpp runs GGUF files"),
        ("--template none.jinja", 3, "--template none.jinja cannot be read"),
        ("--raw --template x", 2, "--raw takes no --template"),
        ("--raw --system x", 2, "--raw takes no --system"),
        ("--temperature 1e-40", 2, "--temperature 1e-40 is invalid"),
    ],
)
def test_what_makes_no_sense(refuse, talker, arguments, code, words):
    assert words in refuse(code, "chat", talker(), *arguments.split())[0]


def test_what_is_typed_is_utf8(monkeypatch):
    typed = io.TextIOWrapper(io.BytesIO("séa\n".encode() + b"s\xe9a\nx\n"), "ascii")
    monkeypatch.setattr("sys.stdin", typed)
    streams.prepare()
    terminal = chat_terminal.Terminal(written(""))
    assert terminal.read("> ") == "séa"
    with pytest.raises(QuantkitError, match="^stdin is neither in the locale's encoding nor UTF-8"):
        terminal.read("> ")


def test_errors_end_what_nobody_types(talker, pipe):
    folder = talker()
    for text, words in (("/no\n", "unknown command /no"), ("/save\n", "/save needs a file")):
        done = pipe(text, folder, "-q")
        assert done.code == 2 and done.err.startswith(f"error: {words}")
    done = pipe("x\n", talker(template=None, name="bare"), "-q")
    assert done.code == 2 and "has no chat template\nhint: add --template FILE" in done.err
    folder = talker(template="{{ raise_exception('no ' + messages[0].role) }}", name="refuses")
    done = pipe("x\n", folder, "-q")
    assert "the conversation does not fit the chat template: no user\nhint: some templates take" in done.err


def test_more_than_the_model_was_made_for_is_a_warning(talker, pipe):
    done = pipe("", talker(), "--ctx", "1k", "-q")
    assert done.code == 0 and "was made for 256 tokens, --ctx is 1,024" in done.err


# ---- Ctrl-C


class Written:
    """An engine that answers with the same text, letter by letter, until it is stopped."""

    def __init__(self, text: str, during=lambda letter: None):
        self.text, self.during = text, during
        self.source, self.name, self.context = "written", "none", 100
        self.facts = EngineFacts("0", 0, "none", False, "float32", "cpu")

    def answer(self, text, raw, sampling, stream, stopped) -> Answer:
        said = ""
        for letter in self.text:
            stream(letter)
            said += letter
            self.during(letter)
            if stopped():
                break
        return Answer(said, 1, 0, len(said), 0.1, 0.1, None if stopped() else "end", None)


@pytest.fixture
def interruptible():
    """SIGINT as a terminal has it, whatever started the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(times: int, at: str):
    def during(letter: str) -> None:
        if letter == at:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    return during


def terminal(session: ChatSession, typed: bool = True) -> chat_terminal.Terminal:
    """A terminal, by default one whose user types."""
    made = chat_terminal.Terminal(session)
    made.typed = typed
    return made


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(interruptible, capsys):
    session = written("abcdef", interrupt(1, "c"))
    assert terminal(session).take("x")
    assert session.messages[-1] == {"role": "assistant", "content": "abc"}
    shown = capsys.readouterr()
    assert shown.out == "abc\n" and ", interrupted" in shown.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    session.engine.during = interrupt(0, "")
    assert terminal(session).take("y")  # the next answer is whole
    assert session.messages[-1]["content"] == "abcdef"


def test_a_second_ctrl_c_drops_the_answer(interruptible, capsys):
    session = written("abcdef", interrupt(2, "c"))
    assert terminal(session).take("x")
    assert session.messages == [] and "the answer was dropped" in capsys.readouterr().err


def test_ctrl_c_ends_what_nobody_types(interruptible):
    session = written("abcdef", interrupt(1, "c"))
    with pytest.raises(KeyboardInterrupt):
        terminal(session, typed=False).take("x")
