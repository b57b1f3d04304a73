"""Requests to a server that was started: addresses, slow and strange answers."""

import socket
import threading
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest

from quantkit.errors import USAGE, QuantkitError
from quantkit.serving.server.client import Endpoint, RequestFailed, base_url, is_loopback


@pytest.mark.parametrize(
    ("url", "base", "local"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1", True),
        ("http://[::1]:80", "http://[::1]:80/v1", True),
        ("127.9.9.9", "http://127.9.9.9:80/v1", True),
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


@contextmanager
def raw(*parts: bytes, drip: float = 0.0, key: str | None = None):
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
        yield Endpoint(f"127.0.0.1:{listener.getsockname()[1]}", key, timeout=0.5)
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("parts", [(OK, b"X-Drip: 1\r\n"), (OK + b"\r\n", b": no end "), (b"H",)])
@pytest.mark.timeout(20)
def test_a_slow_answer_ends_at_its_limit(parts):
    with (
        raw(*parts, drip=0.05) as server,
        pytest.raises(RequestFailed, match=r"within 0\.5 s"),
    ):
        server.fetch("/completions", {})


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"\r\n" + b"[" * 100_000,
        OK + b"\r\n[1]",
        OK + b"\r\n" + b"x" * (5 << 20),
        OK + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n",
        b"no HTTP\r\n\r\n",
    ],
)
def test_a_strange_answer_fails_in_a_line(answer):
    with raw(answer) as server, pytest.raises(RequestFailed) as failed:
        server.fetch("/completions", {})
    assert failed.value.message.count("\n") == 0 and failed.value.hint


def test_a_refusal_never_shows_the_key():
    answer = b"HTTP/1.1 401 Unauthorized\r\n\r\nno entry with Bearer wrong-key"
    with raw(answer, key="wrong-key") as server, pytest.raises(RequestFailed) as failed:
        server.fetch("/completions", {})
    assert "no entry with Bearer …" in failed.value.message and "--api-key" in failed.value.hint


def test_nobody_there():
    with raw(OK + b"\r\n{}") as server:
        assert server.healthy() and server.fetch("/completions", {}) == {}
    assert not server.healthy()
    with pytest.raises(RequestFailed) as failed:
        server.fetch("/completions", {})
    assert failed.value.hint == "is the server running?"
