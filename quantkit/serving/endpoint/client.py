"""One request to an OpenAI endpoint, its answer whole or as it streams in, with the time of every piece.

By the standard library's `http.client`. What is measured is the server, so little may stand before it: the
`openai` package takes a second to import and builds objects of every chunk; httpx changed its name between
versions of what we depend on. Neither redirects nor proxies are followed: what was asked for is measured.
Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html, of which OpenAI's streams
use the field `data` alone.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from quantkit.errors import USAGE, QuantkitError, first_line
from quantkit.models.files import untrusted

MOST_BYTES = 1 << 22  # of an answer that is no stream, or of a line of one
MOST_TOKENS = 1 << 32  # of a request, where a server counts them: beyond it no count is believed
SAID = 300  # characters of a server's own message that are shown
NO_API = "is it the address of an OpenAI API, such as http://127.0.0.1:8000?"


class RequestFailed(QuantkitError):
    """kind: in a word or two, for counting: `HTTP 503`, `timeout`, `connection`, `stream`."""

    def __init__(self, kind: str, message: str, hint: str = "", status: int | None = None):
        super().__init__(message, hint)
        self.kind = kind
        self.status = status


@dataclass(frozen=True)
class Address:
    """Where an endpoint is. path: without a slash at its end; that of the API ends with /v1."""

    scheme: str
    host: str
    port: int
    path: str

    @staticmethod
    def of(url: str) -> Address:
        """`http://127.0.0.1:8000`, with or without /v1. Raises QuantkitError for what is no such URL."""
        hint = "for example http://127.0.0.1:8000"
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise QuantkitError(f"{url!r} is no URL: {error}", hint, USAGE) from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise QuantkitError(f"{url!r} is no URL of an endpoint", hint, USAGE)
        if parts.username or parts.password or parts.query or parts.fragment:
            hint = "give the address alone; a key goes into --api-key or its environment variable"
            raise QuantkitError("the URL holds more than an address", hint, USAGE)
        path = parts.path.rstrip("/")
        path = path if path.endswith("/v1") else f"{path}/v1"
        return Address(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), path)

    @property
    def url(self) -> str:
        """The base URL as clients of the API take it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def local(self) -> bool:
        """Whether it is this machine by what it says; no name is looked up."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True)
class Piece:
    """A chunk of a streamed answer. at: seconds of `time.perf_counter`; usage: tokens counted."""

    at: float
    text: str
    finished: bool
    usage: Mapping[str, int]


class Endpoint:
    """An OpenAI API at an address. Each request has a connection of its own; threads may share this."""

    def __init__(self, address: Address, api_key: str | None = None, timeout: float = 120.0):
        self.address = address
        self.timeout = timeout
        self._key = api_key
        self._tls = ssl.create_default_context() if address.scheme == "https" else None

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON that a request is answered with; `path` goes behind the base URL. Raises RequestFailed."""
        return self._whole("POST", self.address.path + path, body)

    def healthy(self) -> bool:
        """Whether /health answers well. A server that does not listen yet is not."""
        try:
            with self._asked("GET", self.address.path.removesuffix("/v1") + "/health", None, self.timeout):
                return True
        except RequestFailed:
            return False

    def models(self) -> list[str]:
        """The names it serves; [] where it does not say."""
        try:
            listed = self._whole("GET", f"{self.address.path}/models", None).get("data")
        except RequestFailed:
            return []
        rows = listed if isinstance(listed, list) else []
        return [row["id"] for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]

    def stream(self, path: str, body: Mapping[str, Any], seconds: float | None = None) -> Iterator[Piece]:
        """The pieces of a streamed answer as they arrive. The clock of a caller that takes the time before
        the first `next` holds the connecting, too, which on this machine is nothing.

        seconds: that all of it may take. Raises RequestFailed: also for a stream that ends before its end.
        """
        seconds = seconds or self.timeout
        with self._asked("POST", self.address.path + path, body, seconds) as response:
            finished = False
            while line := response.readline(MOST_BYTES):
                at = time.perf_counter()
                if len(line) == MOST_BYTES:
                    raise RequestFailed("stream", f"a line of the answer is longer than {MOST_BYTES:,} bytes")
                name, _, data = line.decode("utf-8", "replace").strip().partition(":")
                if name != "data" or not data:
                    continue
                if data.strip() == "[DONE]":
                    finished = True
                    break
                piece = self._piece(at, data)
                finished = finished or piece.finished
                yield piece
            if not finished:
                raise RequestFailed("stream", "the answer broke off")

    def _whole(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        with self._asked(method, path, body, self.timeout) as response:
            try:
                found = untrusted.parse(response.read(MOST_BYTES))
            except ValueError as error:
                raise RequestFailed("answer", f"{self.address.url} answers with no JSON", NO_API) from error
        if not isinstance(found, dict):
            raise RequestFailed("answer", f"{self.address.url} answers with no object", NO_API)
        return found

    @contextmanager
    def _asked(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float
    ) -> Iterator[HTTPResponse]:
        """Yield a good answer. After `seconds` its connection is shut, however slowly bytes still come. What
        the network raises becomes RequestFailed."""
        where = {"host": self.address.host, "port": self.address.port}
        where["timeout"] = min(self.timeout, seconds)  # of waiting for the next bytes
        tls = self._tls
        connection = HTTPConnection(**where) if tls is None else HTTPSConnection(**where, context=tls)
        headers = {"Content-Type": "application/json", "Accept": "*/*"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        over, url = threading.Event(), self.address.url

        def shut() -> None:
            """End the connection for the thread that waits for it."""
            over.set()
            with suppress(OSError):  # it has ended by itself
                taken.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, shut)
        timer.daemon = True
        try:
            connection.connect()
            taken = connection.sock
            timer.start()
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            self._refuse(response)
            yield response
        except (RequestFailed, OSError, HTTPException, OverflowError) as error:
            if over.is_set() or isinstance(error, TimeoutError):
                late = f"{url} did not answer in time: no end within {seconds:g} s"
                raise RequestFailed("timeout", late) from error
            if isinstance(error, RequestFailed):
                raise
            if isinstance(error, OSError):
                message = f"{url} cannot be reached: {first_line(error)}"
                raise RequestFailed("connection", message, "is the server running?") from error
            # a chunk of 2^64 bytes overflows
            raise RequestFailed("HTTP", f"{url}: {self._hide(first_line(error))}", NO_API) from error
        finally:
            timer.cancel()
            connection.close()

    def _refuse(self, response: HTTPResponse) -> None:
        """Raise for an answer that is an error, with what the server says about it."""
        if response.status == 200:
            return
        said, status = self._hide(_message(response.read(MOST_BYTES))), response.status
        hints = {401: "give the key with --api-key, or in its environment variable", 404: NO_API}
        message = f"the server answers {status} {response.reason}" + (f": {said}" if said else "")
        raise RequestFailed(f"HTTP {status}", message, hints.get(status, ""), status)

    def _hide(self, text: str) -> str:
        """What a server says, without our key where it repeats it."""
        return text.replace(self._key, "…") if self._key else text

    def _piece(self, at: float, data: str) -> Piece:
        """One event of a stream, of either API: text, or what a chat's delta holds, its thoughts included."""
        try:
            event = untrusted.parse(data.encode())
        except ValueError as error:
            raise RequestFailed("stream", "a chunk is no JSON") from error
        if not isinstance(event, dict) or event.get("error"):
            raise RequestFailed("stream", f"the server broke off: {self._hide(_message(data.encode()))}")
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        delta = choice.get("delta") if isinstance(choice.get("delta"), dict) else {}
        names = ("content", "reasoning_content", "reasoning")
        parts = (choice.get("text"), *(delta.get(key) for key in names))
        usage = event.get("usage")
        counts = usage.items() if isinstance(usage, dict) else ()
        return Piece(
            at,
            "".join(part for part in parts if isinstance(part, str)),
            bool(choice.get("finish_reason")),
            {name: n for name, n in counts if type(n) is int and 0 <= n <= MOST_TOKENS},
        )


def _message(data: bytes) -> str:
    """What an error's body says, in whichever of the usual places."""
    text = data.decode("utf-8", "replace").strip()
    try:
        found: Any = untrusted.parse(text.encode())
    except ValueError:
        found = text
    for key in ("error", "detail", "message"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    text = found if isinstance(found, str) else json.dumps(found)
    return text if len(text) <= SAID else f"{text[:SAID]} …"
