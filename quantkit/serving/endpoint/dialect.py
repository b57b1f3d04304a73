"""How an endpoint wants to be asked: which of the two APIs, which model, which fields; asked of itself.

OpenAI's API is what servers agree on, but not all take every field: `ignore_eos` (vLLM, llama.cpp) makes all
answers equally long, `stream_options` makes streams end with a count of tokens; transformers refuses the one,
and counts without the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.errors import QuantkitError, name_all
from quantkit.serving.endpoint.client import Endpoint, RequestFailed
from quantkit.serving.endpoint.prompts import LONG, SHORT, Ruler, words

COMPLETIONS, CHAT = "/completions", "/chat/completions"
FIELDS: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}
ABSENT, REFUSED = (404, 405, 501), (400, 422)


@dataclass(frozen=True)
class Dialect:
    """path: of the API behind the base URL; model: its name, None where the server needs none."""

    path: str
    model: str | None
    fields: dict[str, Any] = field(default_factory=dict)
    ruler: Ruler = Ruler()
    counts: bool = True  # whether the server says how many tokens there were

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        """A request for a stream of at most so many tokens."""
        asked: dict[str, Any] = {"stream": True, "max_tokens": tokens} | self.fields
        asked |= {"model": self.model} if self.model else {}
        if self.path == CHAT:
            return asked | {"messages": [{"role": "user", "content": prompt}]}
        return asked | {"prompt": prompt}

    def tokens(self, endpoint: Endpoint, count: int, seed: int) -> int | None:
        """How many tokens a prompt of `count` words is to the server; None where it does not say."""
        usage = None
        for piece in endpoint.stream(self.path, self.body(words(count, seed), 1)):
            usage = piece.usage or usage
        found = (usage or {}).get("prompt_tokens")
        return found if isinstance(found, int) else None


def learn(endpoint: Endpoint, model: str | None = None, chat: bool | None = None, seed: int = 0) -> Dialect:
    """Ask until the endpoint answers. chat: which API, None for completions where there are.

    Raises RequestFailed with the server's own reason, and the names of models where it has several.
    """
    names = [] if model else endpoint.models()
    last: RequestFailed | None = None
    for dialect in _candidates(model, names, chat):
        if last is not None and last.status in ABSENT and dialect.path == COMPLETIONS:
            continue  # other fields do not make an API appear
        try:
            short = dialect.tokens(endpoint, SHORT, seed - 1)
        except RequestFailed as error:
            if error.status not in (*ABSENT, *REFUSED, 500):
                raise
            last = error
            continue
        if short is None:
            return replace(dialect, counts=False)
        long = dialect.tokens(endpoint, LONG, seed - 2)
        return replace(dialect, ruler=Ruler.fit([(SHORT, short), (LONG, long or short)]))
    assert last is not None
    if len(names) > 1:
        raise QuantkitError(last.message, f"name one of its models with --model: {name_all(names)}") from last
    raise last


def _candidates(model: str | None, names: list[str], chat: bool | None) -> Iterator[Dialect]:
    """From all that we would like down to the least."""
    models = [model] if model else [*names[:1], None] if len(names) == 1 else [None]
    paths = (CHAT,) if chat else (COMPLETIONS,) if chat is False else (COMPLETIONS, CHAT)
    for path in paths:
        for name in models:
            yield Dialect(path, name, dict(FIELDS))
            for left_out in FIELDS:
                yield Dialect(path, name, {key: FIELDS[key] for key in FIELDS if key != left_out})
            yield Dialect(path, name)
