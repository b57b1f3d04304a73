"""The dialect of an endpoint: which of the two APIs, model and fields it takes, found by trying.

Servers agree on OpenAI's API, but not all take every field: `ignore_eos` (vLLM, llama.cpp) makes all
answers equally long, `stream_options` makes streams end with a count of tokens; transformers refuses the
first, and counts without the second.

Prompts are plain words by a seed, which every endpoint takes. Each begins differently, so that no cache of
prefixes answers for the model.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.errors import QuantkitError, name_all
from quantkit.serving.endpoint.client import Endpoint, RequestFailed

COMPLETIONS, CHAT = "/completions", "/chat/completions"
FIELDS: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}
FEW = 16  # words of a prompt
ABSENT, REFUSED = (404, 405, 501), (400, 422)
WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water "
    "room mother area money story fact month lot right study book eye job word business side kind head "
    "house service friend father power hour game line end member law car city name team minute idea kid "
    "body back parent face level office door health person art war history party result change morning"
).split()


def words(count: int, seed: int | str) -> str:
    """Return `count` random words."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


@dataclass(frozen=True)
class Dialect:
    """path: of the API after the base URL; model: its name, None where it needs none. counts: whether the
    server reports numbers of tokens."""

    path: str
    model: str | None
    fields: dict[str, Any] = field(default_factory=dict)
    counts: bool = True

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        """Return a request for a stream of at most `tokens` tokens."""
        request: dict[str, Any] = {"stream": True, "max_tokens": tokens} | self.fields
        request |= {"model": self.model} if self.model else {}
        if self.path == CHAT:
            return request | {"messages": [{"role": "user", "content": prompt}]}
        return request | {"prompt": prompt}


def learn(endpoint: Endpoint, model: str | None = None, seed: int = 0) -> Dialect:
    """Return the first dialect that the endpoint answers, from all fields to none: completions before chat.

    Raises RequestFailed with the server's own reason, and the names of models where it has several.
    """
    names = [] if model else endpoint.models()
    models = [model] if model else [*names, None] if len(names) == 1 else [None]
    fewer = [{key: FIELDS[key] for key in FIELDS if key != left_out} for left_out in FIELDS]
    failed: dict[str, RequestFailed] = {}  # by API, the last one
    for path, name, fields in itertools.product((COMPLETIONS, CHAT), models, (FIELDS, *fewer, {})):
        if path in failed and failed[path].status in ABSENT:
            continue  # other fields do not make an API appear
        dialect = Dialect(path, name, dict(fields))
        try:
            pieces = list(endpoint.stream(path, dialect.body(words(FEW, seed - 1), 1)))
            return replace(dialect, counts=any("prompt_tokens" in piece.usage for piece in pieces))
        except RequestFailed as error:
            if error.status not in (*ABSENT, *REFUSED, 500):
                raise
            failed[path] = error
    last = failed[CHAT]
    if len(names) > 1:
        raise QuantkitError(
            last.message, f"name one of its models with --served-model: {name_all(names)}"
        ) from last
    raise last
