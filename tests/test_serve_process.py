"""Processes of engines: started, waited for, proven and ended with all their children, on a stand-in."""

import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from quantkit.errors import QuantkitError
from quantkit.serving.engines.choose import Offer
from quantkit.serving.server import process
from quantkit.serving.server.command import ServerCommand
from quantkit.serving.server.job import Prepared
from quantkit.serving.server.process import request, serving
from quantkit.serving.server.settings import ServeSettings, free_port
from quantkit.serving.server.sizing import ServerSize

STAND_IN = Path(__file__).with_name("stand_in_engine.py")


def prepared(how: str, chat: bool = False, **settings) -> Prepared:
    port = free_port("127.0.0.1", 0)
    command = ServerCommand((sys.executable, "-S", str(STAND_IN), str(port), how), "demo")
    size = ServerSize(512, 1, None, 512, 0, 10**9, True)
    return Prepared(
        "m", Offer("vllm", True, ""), command, ServeSettings(port=port, **settings), size, chat, ()
    )


def gone(pid: int) -> bool:
    """Whether it ends within ten seconds; a zombie, which nobody here may reap, has ended."""
    try:
        left = psutil.Process(pid)
        if left.status() == psutil.STATUS_ZOMBIE:
            return True
        left.wait(10)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return left.status() == psutil.STATUS_ZOMBIE
    return True


def test_it_is_waited_for_and_proven_and_ended(tmp_path):
    with (
        open(tmp_path / "output", "wb") as output,
        serving(prepared("well"), output=output) as (engine, proof),
    ):
        assert proof["text"] == " as demo says" and proof["usage"] == {"total_tokens": 4}
        assert psutil.pid_exists(engine.pid) and engine.wait(0.01) is None
    assert engine.wait(0) == -signal.SIGTERM and gone(engine.pid)
    assert (tmp_path / "output").read_text() == "loading the model\n"


def test_a_model_with_a_chat_template_is_asked_in_a_chat():
    with serving(prepared("well", chat=True)) as (_, proof):
        assert (proof["api"], proof["text"]) == ("/chat/completions", "chat as demo says")


def test_one_that_dies_while_starting_has_the_last_word():
    with pytest.raises(QuantkitError) as failed, serving(prepared("dies")):
        pass
    assert failed.value.message == (
        "vllm ended with exit code 3 while starting; last lines: "
        "loading the model / no kernel for this layout"
    )


def test_one_that_answers_nothing():
    with pytest.raises(QuantkitError) as failed, serving(prepared("mute", api_key="secret")):
        pass
    assert "is healthy, but answers no request: the server answers 500" in failed.value.message
    assert "no worker for Bearer …" in failed.value.message and "secret" not in failed.value.message
    assert "the worker is dead" in failed.value.message


def test_one_that_answers_something_else():
    with pytest.raises(QuantkitError, match="vllm answers with no completion"), serving(prepared("prose")):
        pass


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "timed out"),
        (b"", "closed connection without response"),
        (b"no HTTP\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n", "IncompleteRead"),
    ],
)
def test_a_request_without_a_good_answer(answer, said):
    def serve() -> None:
        taken, _ = listener.accept()
        with taken:
            taken.recv(1 << 16)
            taken.recv(1) if answer is None else taken.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(QuantkitError) as failed:
            request(f"http://127.0.0.1:{listener.getsockname()[1]}/health", 0.2)
        thread.join(10)
    assert "/health cannot be reached: " in failed.value.message and said in failed.value.message


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.9.9.9", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("localhost.com", False)],
)
def test_which_hosts_are_this_machine(host, local):
    assert ServeSettings(host=host).is_local is local


def test_the_url_of_an_address():
    made = prepared("well", host="::")
    assert made.url == f"http://[::1]:{made.settings.port}/v1"


def test_one_that_is_never_healthy():
    silent = ServerCommand((sys.executable, "-S", "-c", "import time; time.sleep(60)"), "demo")
    told = replace(prepared("well", start_timeout=0.1), command=silent)
    with pytest.raises(QuantkitError) as failed, serving(told):
        pass
    assert "was not healthy within 0.1 s, without output" in failed.value.message
    assert "--start-timeout" in failed.value.hint


def test_one_that_ends_by_itself():
    made = prepared("well")
    with serving(made) as (engine, _):
        os.kill(engine.pid, signal.SIGSEGV)
        error = engine.ended(engine.wait(10))
    assert error.message.startswith(f"vllm ended by signal {signal.SIGSEGV.value}; last lines:")


def test_a_deaf_one_is_killed_with_its_children(monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.2)
    with serving(prepared("deaf")) as (engine, _):
        child = int(next(line for line in engine.last if line.startswith("child")).split()[1])
        assert psutil.pid_exists(child)
    assert engine.wait(0) == -signal.SIGKILL and gone(child)


def test_an_engine_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    """Which may be a model that somebody downloaded."""
    (tmp_path / "json.py").write_text("print('code of the model')")
    monkeypatch.chdir(tmp_path)
    tool = replace(prepared("well"), command=ServerCommand((sys.executable, "-m", "json.tool", "-h"), "m"))
    with pytest.raises(QuantkitError, match="ended with exit code 0") as failed, serving(tool):
        pass
    assert "--compact" in failed.value.message and "code of the model" not in failed.value.message


def test_a_program_that_is_not_there():
    missing = replace(prepared("well"), command=ServerCommand(("/no/such/program",), "m"))
    with pytest.raises(QuantkitError, match="/no/such/program cannot be started"), serving(missing):
        pass
