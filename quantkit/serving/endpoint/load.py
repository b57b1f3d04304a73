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
from quantkit.serving.endpoint.client import Address, Endpoint, RequestFailed
from quantkit.serving.endpoint.dialect import Dialect, learn, words
from quantkit.serving.endpoint.figures import Timed, summarize

SCHEMA = "quantkit.load/1"
USERS = (1, 2, 4, 8, 16, 32)
PER_USER, FEWEST = 4, 8  # requests of a level where nothing is said
MOST_AT_ONCE = 1024
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
        numbers: dict[str, tuple[Any, ...]] = {
            "concurrency": self.concurrency, "rate": self.rates, "seconds": (self.seconds,),
            "timeout": (self.timeout,), "prompt tokens": (self.prompt_tokens,),
            "output tokens": (self.output_tokens,),
            "requests": () if self.requests is None else (self.requests,),
        }  # fmt: skip
        for name, values in numbers.items():
            for value in values:
                if not 0 < value < 1e6 or (name == "concurrency" and value > MOST_AT_ONCE):
                    most = f", at most {MOST_AT_ONCE}" if name == "concurrency" else ""
                    raise QuantkitError(f"{name} {value:g} makes no sense", f"more than 0{most}", USAGE)
        if not self.concurrency and not self.rates:
            raise QuantkitError("no load is asked for", "give --concurrency or --rate", USAGE)


@dataclass(frozen=True)
class Result:
    """levels: the record of each (see figures.summarize), with `users` or `rate`."""

    url: str
    dialect: Dialect
    settings: Settings
    levels: list[dict[str, Any]]
    notes: list[str]

    def record(self) -> dict[str, Any]:
        """The versioned JSON; the key is not in it."""
        asked = asdict(self.settings)
        del asked["api_key"]
        return {
            "schema": SCHEMA,
            "url": self.url,
            "api": self.dialect.path,
            "model": self.dialect.model,
            "ignore_eos": "ignore_eos" in self.dialect.fields,
            "settings": asked,
            "levels": self.levels,
            "notes": self.notes,
        }


def measure(url: str, settings: Settings, listen: Progress | None = None) -> Result:
    """Put an endpoint under load, level by level.

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
    return Result(address.url, dialect, settings, levels, _notes(dialect, settings))


def told(level: dict[str, Any]) -> str:
    """How many of each kind of error, and what the first of them said."""
    told = [f"{number} × {kind} ({level['messages'][kind]})" for kind, number in level["errors"].items()]
    return ", ".join(told) or "no request was made"


def _notes(dialect: Dialect, settings: Settings) -> list[str]:
    """What the figures rest on."""
    length = f"about {settings.prompt_tokens} tokens" if dialect.counts else f"{settings.prompt_tokens} words"
    found = [f"prompts of {length}, answers of at most {settings.output_tokens}"]
    if "ignore_eos" not in dialect.fields:
        found.append("the server takes no ignore_eos: answers may end earlier")
    if not dialect.counts:
        found.append("the server does not count tokens: chunks are counted instead")
    return found


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
