"""Requests with their times of arrival: drawn from stated distributions and a seed, or read from a file.

Arrivals are a Poisson process: the gaps between them are exponential. Prompt and output lengths have streams
of their own, so that another rate brings the same requests at other times.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import NOT_FOUND, USAGE, QuantkitError, first_line
from quantkit.models.files import untrusted

KINDS = ("fixed", "uniform", "geometric", "lognormal")
FIELDS = ("arrival", "prompt_tokens", "output_tokens")
FORMS = "fixed:64, uniform:16-128, geometric:32, lognormal:64,0.8"


@dataclass(frozen=True)
class Request:
    """arrival: seconds from the first one's. prompt, output: tokens."""

    arrival: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts, 1 to `most`. fixed: first. uniform: first to second. geometric: of mean
    first. lognormal: of median first and sigma second."""

    kind: str
    first: float
    second: float = 0.0

    @staticmethod
    def parse(text: str) -> Lengths:
        """`uniform:16-128` and the like. Raises QuantkitError (exit code 2)."""
        kind, _, numbers = text.partition(":")
        try:
            values = [float(value) for value in numbers.replace("-", ",").split(",")]
            wanted = 1 if kind in ("fixed", "geometric") else 2
            sound = kind in KINDS and len(values) == wanted and min(values) > 0 and max(values) < math.inf
            if not sound or values[0] < 1 or (kind == "uniform" and values[1] < values[0]):
                raise ValueError
        except ValueError as error:
            raise QuantkitError(f"{text!r} is no distribution of lengths", f"try {FORMS}", USAGE) from error
        return Lengths(kind, *values)

    def draw(self, stream: random.Random, most: int) -> int:
        """One of them; what is longer than `most` becomes `most`."""
        if self.kind == "fixed":
            value = self.first
        elif self.kind == "uniform":
            value = stream.randint(round(self.first), round(self.second))
        elif self.kind == "lognormal":
            value = stream.lognormvariate(math.log(self.first), self.second)
        elif self.first <= 1:
            value = 1
        else:  # the first success among trials of chance 1/mean
            value = math.ceil(math.log(1 - stream.random()) / math.log(1 - 1 / self.first))
        return max(1, min(most, round(value)))


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, and in words where they come from."""

    requests: tuple[Request, ...]
    origin: str


def sample(
    requests: int = 32,
    rate: float = 8.0,
    prompts: str = "uniform:16-128",
    outputs: str = "geometric:32",
    context: int | None = None,
    seed: int = 0,
) -> Trace:
    """`requests` of them at `rate` a second on average; inf for all at once. prompts, outputs: see `Lengths`.

    Prompts take at most half of `context`, outputs what is left of it. Raises QuantkitError (exit code 2) for
    values that make no sense.
    """
    if requests < 1:
        raise QuantkitError(f"{requests} requests make no trace", "choose 1 or more", USAGE)
    if not rate > 0:
        raise QuantkitError(f"a rate of {rate:g} makes no sense", "choose requests a second, or inf", USAGE)
    of_prompts, of_outputs = Lengths.parse(prompts), Lengths.parse(outputs)
    gaps, first, second = (random.Random(f"{seed} {name}") for name in ("arrivals", "prompts", "outputs"))
    arrival, made = 0.0, []
    for index in range(requests):
        if index and rate < math.inf:
            arrival += gaps.expovariate(rate)
        prompt = of_prompts.draw(first, context // 2 if context else 1 << 30)
        output = of_outputs.draw(second, context - prompt if context else 1 << 30)
        made.append(Request(arrival, prompt, output))
    origin = f"Poisson arrivals at {rate:g}/s, prompts {prompts}, outputs {outputs}, seed {seed}"
    return Trace(tuple(made), origin)


def read(path: Path, context: int | None) -> Trace:
    """A file of JSON lines, `{"arrival": 0.5, "prompt_tokens": 30, "output_tokens": 12}` each.

    Arrivals are in seconds; the first becomes 0. Raises QuantkitError when there is none (exit code 3), or it
    is no plain file (4), or no trace, or a request is longer than `context` (2).
    """
    try:
        lines = untrusted.read(path).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        hint = "give a file of JSON lines"
        raise QuantkitError(f"{path} cannot be read: {reason}", hint, NOT_FOUND) from error
    made = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            made.append(_request(line, f"{path}, line {number}", context))
    if not made:
        raise QuantkitError(f"{path} holds no request", "a JSON object a line", USAGE)
    made.sort(key=lambda request: request.arrival)
    start = made[0].arrival
    shifted = (Request(request.arrival - start, request.prompt, request.output) for request in made)
    return Trace(tuple(shifted), str(path))


def _request(line: str, place: str, context: int | None) -> Request:
    try:
        told = untrusted.parse(line.encode())
        arrival, prompt, output = (told[field] for field in FIELDS)
        sound = all(type(value) is int and value > 0 for value in (prompt, output))
        if isinstance(arrival, bool) or not sound or not math.isfinite(arrival):
            raise ValueError("a number is missing, or none of its kind")
    except (ValueError, KeyError, TypeError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else first_line(error)
        fields = ", ".join(FIELDS)
        raise QuantkitError(f"{place} is no request: {reason}", f"give {fields}", USAGE) from error
    if context is not None and prompt + output > context:
        raise QuantkitError(
            f"{place} needs {prompt + output} tokens, the model was made for {context}",
            "shorten it, or choose another model",
            USAGE,
        )
    return Request(float(arrival), prompt, output)
