"""An OpenAI endpoint under load, in a closed loop: each user sends a request as soon as the last one is
answered. A user is a thread, which mostly waits for the network.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from quantkit.errors import USAGE, QuantkitError, count
from quantkit.quantize.progress import SILENT, Progress
from quantkit.serving.bench.settings import Server
from quantkit.serving.endpoint.client import Endpoint, RequestFailed, is_loopback
from quantkit.serving.endpoint.dialect import Dialect, learn, words
from quantkit.serving.endpoint.figures import Timed, summarize

SCHEMA = "quantkit.load/2"
PER_USER, FEWEST = 4, 8  # default requests: per user, and at least
ANSWER_SECONDS = 60.0  # after these, a level starts no more requests


def measure(url: str, settings: Server, listen: Progress = SILENT) -> dict[str, Any]:
    """Put an endpoint under load, level by level; return the versioned JSON, without the API key.

    levels: per level, the result of `figures.summarize` and `users`.
    Raises QuantkitError (exit code 2) for a wrong URL, or another machine without --allow-remote;
    RequestFailed if the endpoint does not answer at all. Failures under load are counted, not raised.
    """
    settings.check()
    endpoint = Endpoint(url, settings.api_key)
    host = urlsplit(endpoint.url).hostname
    if not is_loopback(host) and not settings.allow_remote:
        hint = "add --allow-remote if you may put load on it"
        raise QuantkitError(f"{host} is another machine", hint, USAGE)
    listen.phase(f"asking {endpoint.url}")
    dialect = learn(endpoint, settings.served_model, settings.seed)
    levels: list[dict[str, Any]] = []
    numbers = itertools.count()  # numbers of prompts over all levels
    for users in settings.numbers("concurrency"):
        levels.append({"users": users} | _level(endpoint, dialect, settings, users, numbers, listen))
        if not levels[-1]["completed"]:
            who, why = count(users, "user"), failures(levels[-1])
            listen.warn(f"no request was answered with {who}: {why}; stopping here")
            break
    counted = [level["prompt_tokens"] for level in levels if level["prompt_tokens"]]
    length = f"{settings.prompt_words} words" + (f" ({counted[0]:.0f} tokens)" if counted else "")
    notes = [f"prompts of {length}, answers of at most {settings.tokens} tokens"]
    if "ignore_eos" not in dialect.fields:
        notes.append("the server takes no ignore_eos: answers may end earlier")
    if not dialect.counts:
        notes.append("the server does not count tokens: chunks are counted instead")
    return {
        "schema": SCHEMA,
        "url": endpoint.url,
        "api": dialect.path,
        "model": dialect.model,
        "ignore_eos": "ignore_eos" in dialect.fields,
        "settings": settings.record(),
        "levels": levels,
        "notes": notes,
    }


def failures(level: dict[str, Any]) -> str:
    """Return a line with the number of errors of each kind and the first message of each."""
    shown = [f"{number} × {kind} ({level['messages'][kind]})" for kind, number in level["errors"].items()]
    return ", ".join(shown) or "no request was made"


def _level(
    endpoint: Endpoint,
    dialect: Dialect,
    settings: Server,
    users: int,
    numbers: Iterator[int],
    listen: Progress,
) -> dict[str, Any]:
    """Return the record of one level. Raises errors of its threads."""
    total = settings.requests or max(FEWEST, PER_USER * users)
    left, until = iter(range(total)), time.perf_counter() + ANSWER_SECONDS
    done: list[Timed] = []
    broken: list[BaseException] = []

    def user() -> None:
        try:
            while not broken and time.perf_counter() < until and next(left, None) is not None:
                prompt = words(settings.prompt_words, f"{settings.seed}:{next(numbers)}")
                done.append(_ask(endpoint, dialect, prompt, settings.tokens))
        except BaseException as error:
            broken.append(error)

    threads = [threading.Thread(target=user, daemon=True) for _ in range(min(users, total))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)
            listen.counting(count(users, "user"), len(done), total)
    if broken:
        raise broken[0]
    return summarize(done)


def _ask(endpoint: Endpoint, dialect: Dialect, prompt: str, tokens: int) -> Timed:
    """Send one request and return its times."""
    at: list[float] = []
    usage: Any = {}
    began = time.perf_counter()
    try:
        for piece in endpoint.stream(dialect.path, dialect.body(prompt, tokens)):
            usage = piece.usage or usage
            if piece.text:
                at.append(piece.at)
    except RequestFailed as error:
        return Timed(began, time.perf_counter(), error=error.kind, message=error.message)
    counted = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    return Timed(began, time.perf_counter(), tuple(at), *counted)
