"""Requests to an OpenAI endpoint: addresses, streams, and what goes wrong, on a stand-in."""

import socket
import threading
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest
from stand_in_openai import StandIn

from quantkit.errors import USAGE, QuantkitError
from quantkit.serving.endpoint.client import Endpoint, RequestFailed, base_url, is_loopback
from quantkit.serving.endpoint.dialect import CHAT, COMPLETIONS, FIELDS, learn, words


def endpoint(server: StandIn, **options) -> Endpoint:
    return Endpoint(server.url, **options)


@pytest.mark.parametrize(
    ("url", "base", "local"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1", True),
        ("localhost:8000/v1/", "http://localhost:8000/v1", True),
        ("http://[::1]:80", "http://[::1]:80/v1", True),
        ("http://127.9.9.9", "http://127.9.9.9:80/v1", True),
        ("https://example.org/openai", "https://example.org:443/openai/v1", False),
        ("http://10.0.0.1:8000/v1", "http://10.0.0.1:8000/v1", False),
        ("http://0.0.0.0:1", "http://0.0.0.0:1/v1", False),
        ("http://localhost.example.org", "http://localhost.example.org:80/v1", False),
    ],
)
def test_addresses(url, base, local):
    found = base_url(url)
    assert (found, is_loopback(urlsplit(found).hostname)) == (base, local)


@pytest.mark.parametrize(
    "url", ["ftp://a", "http://", "http://a:99999", "http://me:secret@a", "http://a?k=1"]
)
def test_no_addresses(url):
    with pytest.raises(QuantkitError) as refused:
        base_url(url)
    assert refused.value.exit_code == USAGE and "secret" not in str(refused.value)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream(path):
    asked = {"stream": True, "max_tokens": 3}
    asked |= {"prompt": "a b"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a b"}]}
    with StandIn() as server:
        pieces = list(endpoint(server).stream(path, asked))
    assert [piece.text for piece in pieces] == [" w0", " w1", " w2", ""]
    assert [piece.finished for piece in pieces] == [False] * 3 + [True]
    assert pieces[-1].usage == {"prompt_tokens": 5, "completion_tokens": 3}
    assert [piece.at for piece in pieces] == sorted(piece.at for piece in pieces)


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("503", "HTTP 503", 'the server answers 503 Service Unavailable: {"error": {"message": "too busy"}}'),
        ("break", "stream", "the answer broke off"),
        ("error", "stream", 'the server broke off: {"error": {"message": "it broke"}}'),
        ("silence", "timeout", "did not answer in time"),
    ],
)
def test_what_fails(how, kind, said):
    with StandIn(failing=(1, how)) as server:
        asked = endpoint(server, timeout=0.3).stream(
            COMPLETIONS, {"prompt": "a", "max_tokens": 3, "stream": True}
        )
        with pytest.raises(RequestFailed) as failed:
            list(asked)
    assert failed.value.kind == kind and said in failed.value.message


def test_nobody_there():
    with StandIn() as server:
        gone = endpoint(server)
    assert not gone.healthy() and gone.models() == []
    with pytest.raises(RequestFailed) as failed:
        gone.fetch(COMPLETIONS, {})
    assert failed.value.kind == "connection" and failed.value.hint == "is the server running?"


def test_a_key_is_sent_and_never_shown():
    with StandIn(key="right") as server:
        assert learn(endpoint(server, api_key="right")).counts
        with pytest.raises(RequestFailed) as failed:
            learn(endpoint(server, api_key="wrong-key"))
    assert failed.value.status == 401 and "wrong-key" not in str(failed.value)
    assert "no entry with Bearer …" in failed.value.message and "--api-key" in failed.value.hint


def test_fields_that_a_server_refuses_are_left_out():
    with StandIn() as server:
        assert learn(endpoint(server)).fields == FIELDS
    with StandIn(refuses=("ignore_eos",)) as server:
        found = learn(endpoint(server))
    assert list(found.fields) == ["stream_options"] and found.model == "stand-in"
    with StandIn(refuses=tuple(FIELDS)) as server:
        assert learn(endpoint(server)).fields == {}


def test_which_api_and_which_model():
    with StandIn(chat_only=True, models=None) as server:
        found = learn(endpoint(server))
        assert (found.path, found.model) == (CHAT, None)
    with StandIn(models=["one", "two"]) as server:
        assert learn(endpoint(server), "two").body("x", 1)["model"] == "two"
        with pytest.raises(QuantkitError, match="no such model"):
            learn(endpoint(server), "three")


def test_prompts_are_seeded():
    assert words(5, "0:1") == words(5, "0:1") != words(5, "0:2")
    assert len(words(40, 7).split()) == 40


@contextmanager
def raw(*parts: bytes, drip: float = 0.0):
    """A server of any bytes: to every connection the parts, the last of them again and again if it drips."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while not over.is_set():
            try:
                taken, _ = listener.accept()
            except OSError:
                return
            with taken, suppress(OSError):
                asked = taken.recv(1 << 16)
                while asked.startswith(b"POST") and not asked.endswith(b"{}"):
                    asked += taken.recv(1 << 16)  # unread bytes would make the end a reset
                for part in parts:
                    taken.sendall(part)
                while drip and not over.wait(drip):
                    taken.sendall(parts[-1])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield Endpoint(f"127.0.0.1:{listener.getsockname()[1]}", timeout=0.5)
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


OK = b"HTTP/1.1 200 OK\r\n"
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("parts", [(OK, b"X-Drip: 1\r\n"), (OK + b"\r\n", b": no end "), (b"H",)])
@pytest.mark.timeout(20)
def test_a_slow_answer_ends_at_its_limit(parts):
    with raw(*parts, drip=0.05) as server:
        with pytest.raises(RequestFailed) as failed:
            list(server.stream(COMPLETIONS, {}))
        assert failed.value.kind == "timeout" and "within 0.5 s" in failed.value.message
        with pytest.raises(RequestFailed) as failed:
            server.fetch("/models", {})
        assert failed.value.kind == "timeout"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (OK + b"\r\ndata: " + b"[" * 100_000 + b"\n\n", "stream"),
        (OK + b"\r\ndata: [1]\n\n" + DONE, "stream"),
        (OK + b"\r\n" + b"x" * (5 << 20), "stream"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n", "HTTP"),
    ],
)
def test_a_strange_answer_fails_in_a_line(answer, kind):
    with raw(answer) as server, pytest.raises(RequestFailed) as failed:
        list(server.stream(COMPLETIONS, {}))
    assert failed.value.kind in (kind, "stream")


@pytest.mark.parametrize("count", [b"1e400", b"9" * 400, b"[1]", b"-1", b"true", b'"7"', b"NaN"])
def test_a_count_that_is_none_is_not_believed(count):
    event = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": ' + count + b"}}\n\n"
    with raw(OK + b"\r\n" + event + DONE) as server:
        (piece,) = server.stream(COMPLETIONS, {})
    assert piece.usage == {"prompt_tokens": 3}
