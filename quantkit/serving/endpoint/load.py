"""An OpenAI endpoint under load: `measure`.

Closed loop: so many users, each of whom asks again as soon as it is answered. Given rate: requests arrive as
a Poisson process (exponential gaps, seeded) whether or not others are answered, and are timed from when they
were due, so that a server that falls behind cannot hide it ("coordinated omission", G. Tene).
Each user is a thread, which waits for the network nearly all of its time.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from quantkit.errors import USAGE, QuantkitError, count
from quantkit.quantize.progress import Progress
from quantkit.serving.bench.settings import require_numbers
from quantkit.serving.endpoint.client import Address, Endpoint, RequestFailed
from quantkit.serving.endpoint.dialect import Dialect, learn, words
from quantkit.serving.endpoint.figures import Timed, summarize

SCHEMA = "quantkit.load/1"
USERS = (1, 2, 4, 8, 16, 32)
PER_USER, FEWEST = 4, 8  # requests of a level where nothing is said
MOST_AT_ONCE = 1024
LEAST = 1e-6  # seconds, and requests a second
FAILED = 5  # requests in a row that failed at once: the level ends, the server is not there


@dataclass(frozen=True)
class Settings:
    """concurrency: users, level by level; rates: requests a second instead of these.

    requests: of a level, or of each rate (default: 4 a user, at least 8); seconds: after which a level begins
    no more; timeout: of one request. prompt_tokens, output_tokens: of each. model: its name; chat: the chat
    API instead of completions (None: what there is). remote: ask another machine than this one.
    """

    concurrency: tuple[int, ...] = USERS
    rates: tuple[float, ...] = ()
    requests: int | None = None
    seconds: float = 60.0
    timeout: float = 120.0
    prompt_tokens: int = 128
    output_tokens: int = 64
    seed: int = 0
    model: str | None = None
    chat: bool | None = None
    remote: bool = False
    api_key: str | None = field(default=None, repr=False)

    def check(self) -> None:
        """Raise QuantkitError for numbers that make no sense."""
        if not self.concurrency and not self.rates:
            raise QuantkitError("no load is asked for", "give --concurrency or --rate", USAGE)
        if max(self.concurrency, default=0) > MOST_AT_ONCE:
            message = f"--concurrency {max(self.concurrency)} makes no sense"
            raise QuantkitError(message, f"choose at most {MOST_AT_ONCE}", USAGE)
        require_numbers(
            ("--concurrency", self.concurrency, 1), ("--rate", self.rates, LEAST),
            ("seconds", self.seconds, LEAST), ("timeout", self.timeout, LEAST),
            ("--prompt", self.prompt_tokens, 1), ("--tokens", self.output_tokens, 1),
            ("--requests", self.requests, 1),
        )  # fmt: skip


def measure(url: str, settings: Settings, listen: Progress | None = None) -> dict[str, Any]:
    """Put an endpoint under load, level by level: the versioned JSON, in which the key is not.

    levels: the record of each (see figures.summarize), with `users` or `rate`.
    Raises QuantkitError for a URL that is none, or of another machine without `remote` (exit code 2), and
    RequestFailed where the endpoint does not answer at all. What fails under load is counted, not raised.
    """
    listen = listen or Progress()
    settings.check()
    address = Address.of(url)
    if not address.local and not settings.remote:
        raise QuantkitError(
            f"{address.host} is another machine, and load is put on this one alone",
            "add --remote if it is yours to put load on",
            USAGE,
        )
    endpoint = Endpoint(address, settings.api_key, settings.timeout)
    listen.phase(f"asking {address.url}")
    dialect = learn(endpoint, settings.model, settings.chat, settings.seed)
    levels: list[dict[str, Any]] = []
    run = _Run(endpoint, dialect, settings, listen)
    try:
        for rate in settings.rates:
            levels.append({"rate": rate} | run.arrivals(rate))
        for users in () if settings.rates else settings.concurrency:
            levels.append({"users": users} | run.users(users))
            if not levels[-1]["completed"]:
                who, why = count(users, "user"), told(levels[-1])
                listen.warn(f"with {who} nobody was answered: {why}; stopping here")
                break
    finally:
        run.stop.set()  # whoever still asks ends with its next piece
    length = f"about {settings.prompt_tokens} tokens" if dialect.counts else f"{settings.prompt_tokens} words"
    notes = [f"prompts of {length}, answers of at most {settings.output_tokens}"]
    if "ignore_eos" not in dialect.fields:
        notes.append("the server takes no ignore_eos: answers may end earlier")
    if not dialect.counts:
        notes.append("the server does not count tokens: chunks are counted instead")
    asked = asdict(settings)
    del asked["api_key"]
    return {
        "schema": SCHEMA,
        "url": address.url,
        "api": dialect.path,
        "model": dialect.model,
        "ignore_eos": "ignore_eos" in dialect.fields,
        "settings": asked,
        "levels": levels,
        "notes": notes,
    }


def told(level: dict[str, Any]) -> str:
    """How many of each kind of error, and what the first of them said."""
    told = [f"{number} × {kind} ({level['messages'][kind]})" for kind, number in level["errors"].items()]
    return ", ".join(told) or "no request was made"


class _Run:
    """The levels of one measurement; prompts are numbered through all of them."""

    def __init__(self, endpoint: Endpoint, dialect: Dialect, settings: Settings, listen: Progress):
        self._endpoint, self._dialect, self._settings, self._listen = endpoint, dialect, settings, listen
        self._words = dialect.words(settings.prompt_tokens)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._broken: list[BaseException] = []
        self.stop = threading.Event()

    def users(self, users: int) -> dict[str, Any]:
        """A closed loop."""
        total = self._settings.requests or max(FEWEST, PER_USER * users)
        left = iter(range(total))
        done: list[Timed] = []
        until = time.perf_counter() + self._settings.seconds

        def user() -> None:
            failed = 0
            while not self.stop.is_set() and failed < FAILED and time.perf_counter() < until:
                with self._lock:
                    if next(left, None) is None:
                        return
                made = self._ask(time.perf_counter())
                failed = failed + 1 if made.error else 0
                with self._lock:
                    done.append(made)

        threads = [self._start(user) for _ in range(min(users, total))]
        self._wait(threads, done, total, count(users, "user"))
        return summarize(done)

    def arrivals(self, rate: float) -> dict[str, Any]:
        """A given rate. An arrival that finds all threads busy is counted as one that could not be made."""
        settings = self._settings
        total = settings.requests or max(FEWEST, round(min(rate * settings.seconds, 1000)))
        gaps = random.Random(settings.seed)
        done: list[Timed] = []
        threads: list[threading.Thread] = []
        lost = 0
        due = began = time.perf_counter()
        for number in range(total):
            due += gaps.expovariate(rate)
            if due - began > settings.seconds:
                break
            while (early := due - time.perf_counter()) > 0:
                time.sleep(min(early, 0.5))
            threads = [thread for thread in threads if thread.is_alive()]
            if len(threads) >= MOST_AT_ONCE:
                lost += 1
                continue

            def request(at: float = due) -> None:
                made = self._ask(at)
                with self._lock:
                    done.append(made)

            threads.append(self._start(request))
            self._listen.counting(f"{rate:g} requests a second", number, total)
        self._wait(threads, done, total, f"{rate:g} requests a second")
        return summarize(done, lost)

    def _start(self, target: Callable[[], None]) -> threading.Thread:
        """A thread that does not outlive the command; what goes wrong in it is raised by `_wait`."""

        def run() -> None:
            try:
                target()
            except BaseException as error:
                self._broken.append(error)
                self.stop.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _wait(self, threads: list[threading.Thread], done: list[Timed], total: int, what: str) -> None:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
                self._listen.counting(what, len(done), total)
        if self._broken:
            raise self._broken[0]

    def _ask(self, due: float) -> Timed:
        """One request, from when it was due."""
        with self._lock:
            number = next(self._numbers)
        prompt = words(self._words, f"{self._settings.seed}:{number}")
        at: list[float] = []
        usage: Any = {}
        try:
            body = self._dialect.body(prompt, self._settings.output_tokens)
            for piece in self._endpoint.stream(self._dialect.path, body, self._settings.timeout):
                usage = piece.usage or usage
                if piece.text:
                    at.append(piece.at)
                if self.stop.is_set():
                    break
        except RequestFailed as error:
            return Timed(due, time.perf_counter(), error=error.kind, message=error.message)
        counted = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        return Timed(due, time.perf_counter(), tuple(at), *counted)
