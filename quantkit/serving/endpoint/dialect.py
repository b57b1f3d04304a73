"""How an endpoint wants to be asked: which of the two APIs, which model, which fields, how many words a token
is; asked of itself.

OpenAI's API is what servers agree on, but not all take every field: `ignore_eos` (vLLM, llama.cpp) makes all
answers equally long, `stream_options` makes streams end with a count of tokens; transformers refuses the one,
and counts without the other.

Prompts are plain words by a seed, which every endpoint takes. Each begins differently, so that no cache of
prefixes answers for the model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.errors import QuantkitError, name_all
from quantkit.serving.endpoint.client import Endpoint, RequestFailed

COMPLETIONS, CHAT = "/completions", "/chat/completions"
FIELDS: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}
ABSENT, REFUSED = (404, 405, 501), (400, 422)
WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water "
    "room mother area money story fact month lot right study book eye job word business side kind head "
    "house service friend father power hour game line end member law car city name team minute idea kid "
    "body back parent face level office door health person art war history party result change morning"
).split()
SHORT, LONG = 16, 80  # words of the prompts that the ruler is fitted to


def words(count: int, seed: int | str) -> str:
    """So many words."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


@dataclass(frozen=True)
class Dialect:
    """path: of the API behind the base URL; model: its name, None where it needs none. overhead: tokens
    that a chat template and BOS add to those of the words."""

    path: str
    model: str | None
    fields: dict[str, Any] = field(default_factory=dict)
    overhead: float = 0.0
    per_word: float = 1.0
    counts: bool = True  # whether the server says how many tokens there were

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        """A request for a stream of at most so many tokens."""
        asked: dict[str, Any] = {"stream": True, "max_tokens": tokens} | self.fields
        asked |= {"model": self.model} if self.model else {}
        if self.path == CHAT:
            return asked | {"messages": [{"role": "user", "content": prompt}]}
        return asked | {"prompt": prompt}

    def words(self, tokens: int) -> int:
        """How many make a prompt of about so many tokens."""
        return max(1, round((tokens - self.overhead) / self.per_word))

    def tokens(self, endpoint: Endpoint, count: int, seed: int) -> int | None:
        """How many tokens a prompt of `count` words is to the server; None where it does not say."""
        pieces = endpoint.stream(self.path, self.body(words(count, seed), 1))
        usage = [piece.usage for piece in pieces if piece.usage]
        return usage[-1].get("prompt_tokens") if usage else None

    def ruled(self, endpoint: Endpoint, seed: int) -> Dialect:
        """The same that knows how many tokens a word is, by asking with few and with many."""
        few = self.tokens(endpoint, SHORT, seed - 1)
        if few is None:
            return replace(self, counts=False)
        many = self.tokens(endpoint, LONG, seed - 2) or few
        per_word = max((many - few) / (LONG - SHORT), 0.1)
        return replace(self, per_word=per_word, overhead=max(few - per_word * SHORT, 0.0))


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
            return dialect.ruled(endpoint, seed)
        except RequestFailed as error:
            if error.status not in (*ABSENT, *REFUSED, 500):
                raise
            last = error
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
