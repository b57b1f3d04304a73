"""Requests to the OpenAI API of a server that was started.

It uses the standard library's `http.client`. Redirects and proxies are not followed.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from quantkit.errors import USAGE, QuantkitError, first_line
from quantkit.models.files import untrusted

MOST_BYTES = 1 << 22  # of an answer
SHOWN_CHARACTERS = 300  # characters of a server's message that are shown
NO_API = "is it the address of an OpenAI API, such as http://127.0.0.1:8000?"


class RequestFailed(QuantkitError):
    """A request without a good answer."""


def base_url(url: str) -> str:
    """Normalize an address: add scheme, port and /v1 if missing, as in `http://127.0.0.1:8000/v1`.

    Raises QuantkitError (exit code 2) if the text is not an address.
    """
    hint = "for example http://127.0.0.1:8000"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or 80
    except ValueError as error:
        raise QuantkitError(f"{url!r} is not a URL: {error}", hint, USAGE) from error
    if parts.scheme != "http" or not parts.hostname:
        raise QuantkitError(f"{url!r} is not the URL of an endpoint", hint, USAGE)
    if parts.username or parts.password or parts.query or parts.fragment:
        hint = "give the address alone; a key goes into --api-key or its environment variable"
        raise QuantkitError("the URL holds more than an address", hint, USAGE)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{port}{parts.path.rstrip('/').removesuffix('/v1')}/v1"


def is_loopback(host: str | None) -> bool:
    """Return whether `host` is localhost or a loopback address; names are not looked up."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


class Endpoint:
    """An OpenAI API at a URL. Safe to share between threads: each request opens its own connection."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 120.0):
        self.url = base_url(url)
        self._api = urlsplit(self.url).path
        self.timeout = timeout
        self._key = api_key

    def fetch(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON object that answers `path`, relative to the base URL. Raises RequestFailed."""
        with self._opened(self._api + path, body) as response:
            try:
                return dict(untrusted.parse(response.read(MOST_BYTES)))
            except (ValueError, TypeError) as error:
                raise RequestFailed(f"{self.url} answers with no JSON object", NO_API) from error

    def healthy(self) -> bool:
        """Return whether /health answers with success. False for a server that does not listen yet."""
        try:
            with self._opened(self._api.removesuffix("/v1") + "/health"):
                return True
        except RequestFailed:
            return False

    @contextmanager
    def _opened(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[HTTPResponse]:
        """Yield the response if its status is 200. The connection is closed after `timeout` seconds.

        Raises RequestFailed for network errors and other statuses.
        """
        place, over = urlsplit(self.url), threading.Event()
        connection = HTTPConnection(str(place.hostname), place.port, timeout=self.timeout)
        headers = {"Content-Type": "application/json", "Accept": "*/*"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}

        def shut() -> None:
            """End the connection for the thread that waits for it."""
            over.set()
            with suppress(OSError):  # it has ended by itself
                taken.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(self.timeout, shut)
        timer.daemon = True
        try:
            connection.connect()
            taken = connection.sock
            timer.start()
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refusal(response)
            yield response
        except (RequestFailed, OSError, HTTPException, OverflowError) as error:
            if over.is_set() or isinstance(error, TimeoutError):
                late = f"{self.url} did not answer in time: no end within {self.timeout:g} s"
                raise RequestFailed(late) from error
            if isinstance(error, RequestFailed):
                raise
            message = f"{self.url} cannot be reached: {self._shown(first_line(error))}"
            if isinstance(error, OSError):
                raise RequestFailed(message, "is the server running?") from error
            raise RequestFailed(message, NO_API) from error  # a chunk of 2^64 bytes overflows
        finally:
            timer.cancel()
            connection.close()

    def _refusal(self, response: HTTPResponse) -> RequestFailed:
        """Return the error for a response with a status other than 200, with the server's message."""
        status, reason = response.status, self._shown(response.read(MOST_BYTES).decode("utf-8", "replace"))
        hints = {401: "give the key with --api-key, or in its environment variable", 404: NO_API}
        message = f"the server answers {status} {response.reason}: {reason}"
        return RequestFailed(message, hints.get(status, ""))

    def _shown(self, text: str) -> str:
        """Return the beginning of a server's message, with the API key removed."""
        text = (text.replace(self._key, "…") if self._key else text).strip()
        return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} …"
