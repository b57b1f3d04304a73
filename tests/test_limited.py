"""Templates of strangers end: by themselves, or when their time, memory or output is used up."""

import os
import signal
import time

import pytest

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.models.open import open_checkpoint
from quantkit.text import limited
from quantkit.text.chat import ChatTemplate, Conversation

ASKED = Conversation([{"role": "user", "content": "Ba da"}], "row 1")


def test_what_is_returned_comes_back():
    assert limited.run(lambda: "ü" * 100_000) == "ü" * 100_000


def test_errors_come_back_in_a_line():
    def fails() -> str:
        raise ValueError("no such role\nin line 3")

    with pytest.raises(limited.Failed, match="^no such role$"):
        limited.run(fails)


def test_nothing_of_the_child_stays(tmp_path):
    def forget() -> str:
        os.environ["OF_A_CHILD"] = "1"
        return "done"

    assert limited.run(forget) == "done" and "OF_A_CHILD" not in os.environ


class OfAnotherKind(BaseException):
    """As a panic of a library in Rust: no Exception."""


class OfNoText(Exception):
    def __str__(self):
        raise OfAnotherKind


def _raises(error: BaseException) -> str:
    raise error


def _no_memory_for_words() -> str:
    limited.json.dumps = lambda said: _raises(MemoryError())  # of the child alone
    raise MemoryError


def _asked_to_stop() -> str:
    os.kill(os.getpid(), signal.SIGTERM)
    return "went on"


@pytest.mark.parametrize(
    "work, kind, said",
    [
        (lambda: _raises(SystemExit(3)), limited.Failed, "no error"),
        (lambda: _raises(OfAnotherKind()), limited.Failed, "no error"),
        (lambda: _raises(OfNoText()), limited.Failed, "no error"),
        (lambda: _raises(MemoryError()), limited.Runaway, "MiB of memory"),
        (_no_memory_for_words, limited.Runaway, "more than 256 MiB of memory"),
        (_asked_to_stop, limited.Runaway, "MiB of memory, or 10 seconds"),
    ],
)
def test_a_child_never_goes_on_as_a_copy_of_its_parent(work, kind, said):
    parent = os.getpid()
    try:
        with pytest.raises(kind, match=said):
            limited.run(work)
    finally:
        if os.getpid() != parent:  # then the parent hears nothing, and fails
            os._exit(9)


@pytest.mark.parametrize(
    "template, said",
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "does not end"),
        ("{{ 'x' * 3000000000 }}", "MiB of memory"),
        ("{{ '%2000000000d' % 1 }}", "MiB of memory"),
        ("{{ '{:2000000000}'.format(1) }}", "MiB of memory"),
        ("{{ 'a b ' * 5000000 }}", "more than 16 MiB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
    ],
)
def test_a_template_that_runs_away_is_stopped(tiny_model, monkeypatch, template, said):
    checkpoint = open_checkpoint(str(tiny_model("llama", tokenizer="bos")))
    monkeypatch.setattr(limited.run, "__defaults__", (2.0 if "end" in said else 30.0,))
    began = time.monotonic()
    with pytest.raises(QuantkitError, match=f"^the model's chat template was stopped: .*{said}") as raised:
        ChatTemplate(checkpoint.tokenizer, template).render(ASKED)
    assert raised.value.exit_code == UNSUPPORTED and time.monotonic() - began < 60
