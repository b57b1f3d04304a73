"""Templates of strangers end: by themselves, or when their time, memory or output is used up."""

import os
import signal

import pytest
from nights import nightly

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.models.files.open import open_checkpoint
from quantkit.text import template_worker
from quantkit.text.chat import ChatTemplate, Conversation

ASKED = Conversation([{"role": "user", "content": "Ba da"}], "row 1")


TEXT = "{{ messages[0].content }}"


def say(text: str, template: str = TEXT, **tokens: str) -> str:
    return template_worker.WORKER.render(template, [{"role": "user", "content": text}], tokens)


def test_what_is_rendered_comes_back():
    assert say("ü\ud800\n" * 50_000) == "ü\ud800\n" * 50_000
    assert say("", "{{ bos_token }}{{ messages[0].role }}", bos_token="<s>") == "<s>user"


def test_errors_come_back_in_a_line():
    with pytest.raises(template_worker.Failed, match="^no such role$"):
        say("", "{{ raise_exception('no such role\nin line 3') }}")


def test_one_process_renders_all_and_another_follows_a_runaway(monkeypatch):
    def forbidden() -> int:
        raise AssertionError("a process with threads must not be forked")

    monkeypatch.setattr(os, "fork", forbidden)
    monkeypatch.setattr(template_worker, "WORKER", template_worker.Worker())
    started: list[int] = []
    start = template_worker.Worker._start

    def noted(worker: template_worker.Worker) -> None:
        start(worker)
        started.append(worker._running[0].pid)

    monkeypatch.setattr(template_worker.Worker, "_start", noted)
    assert [say(text) for text in "abc"] == ["a", "b", "c"] and len(started) == 1
    with pytest.raises(template_worker.Failed):
        say("", "{{ raise_exception('no') }}")
    assert say("d") == "d" and len(started) == 1
    with pytest.raises(template_worker.Runaway, match="calls itself"):
        say("", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    assert say("e") == "e" and len(started) == 2
    os.kill(started[-1], signal.SIGKILL)
    os.waitid(os.P_PID, started[-1], os.WEXITED | os.WNOWAIT)
    with pytest.raises(template_worker.Runaway, match="MiB of memory, or 10 seconds"):
        say("f")
    assert say("g") == "g" and len(started) == 3
    template_worker.WORKER.stop()


def test_an_interrupt_leaves_no_answer_for_the_next(monkeypatch):
    monkeypatch.setattr(template_worker, "WORKER", template_worker.Worker())
    say("first")
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(template_worker, "_received", lambda pipe: _raises(KeyboardInterrupt()))
        say("second")
    assert say("third") == "third"
    template_worker.WORKER.stop()


def _raises(error: BaseException) -> bytes:
    raise error


@pytest.mark.parametrize(
    "template, said",
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "does not end"),
        ("{{ 'x' * 3000000000 }}", "MiB of memory"),
        ("{{ 'a b ' * 5000000 }}", "more than 16 MiB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
        *nightly(
            ("{{ '%2000000000d' % 1 }}", "MiB of memory"),
            ("{{ '{:2000000000}'.format(1) }}", "MiB of memory"),
        ),
    ],
)
def test_a_template_that_runs_away_is_stopped(tiny_model, monkeypatch, template, said):
    checkpoint = open_checkpoint(str(tiny_model("llama", tokenizer="bos")))
    monkeypatch.setattr(template_worker, "SECONDS", 2.0 if said == "does not end" else 60.0)
    with pytest.raises(QuantkitError, match=f"^the chat template was stopped: .*{said}") as raised:
        ChatTemplate(checkpoint.tokenizer, template).render(ASKED)
    assert raised.value.exit_code == UNSUPPORTED
