"""A request to the server that quantkit started. Redirects and proxies are not followed."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from quantkit.errors import QuantkitError, first_line

MOST_BYTES = 1 << 22  # maximum of an answer; the rest is not read
SHOWN_CHARACTERS = 300  # characters of a server's message that are shown


class RequestFailed(QuantkitError):
    """A request without an answer, or with a status other than 200."""


def is_loopback(host: str) -> bool:
    """Return whether `host` is localhost or a loopback address; names are not looked up."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def request(url: str, timeout: float, body: Mapping[str, Any] | None = None, key: str | None = None) -> bytes:
    """Return the answer to a POST of `body` as JSON, or to a GET. timeout: seconds without a byte.

    key: API key. Raises RequestFailed, without the key.
    """
    address = urlsplit(url)
    connection = HTTPConnection(address.netloc, timeout=timeout)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body)
    try:
        connection.request("GET" if data is None else "POST", address.path, data, headers)
        response = connection.getresponse()
        answer = response.read(MOST_BYTES)
    except (OSError, HTTPException) as error:
        raise RequestFailed(f"{url} cannot be reached: {first_line(error)}") from error
    finally:
        connection.close()
    if response.status != 200:
        text = answer.decode("utf-8", "replace").replace(key or "\0", "…").strip()
        shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} …"
        raise RequestFailed(f"the server answers {response.status} {response.reason}: {shown}")
    return answer
