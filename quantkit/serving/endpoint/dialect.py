"""The dialect of an endpoint: the API, model name and fields that it accepts, found by trying.

Servers share OpenAI's API but not all fields. `ignore_eos` (vLLM, llama.cpp) makes all answers equally long;
transformers rejects it. `stream_options` makes streams end with token counts; transformers sends them anyway.

Prompts are random words, which every endpoint accepts. Each begins differently, so that servers cannot reuse
cached prefixes.
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
FEW_WORDS = 16  # words of a test prompt
ABSENT, REFUSED = (404, 405, 501), (400, 422)
WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water "
    "room mother area money story fact month lot right study book eye job word business side kind head "
    "house service friend father power hour game line end member law car city name team minute idea kid "
    "body back parent face level office door health person art war history party result change morning"
).split()


def words(count: int, seed: int | str) -> str:
    """Return a text of `count` random words."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


@dataclass(frozen=True)
class Dialect:
    """How to ask an endpoint. path: the API's, relative to the base URL. model: name to send, None if none is
    needed. fields: further fields to send. counts: whether the server reports token counts."""

    path: str
    model: str | None
    fields: dict[str, Any] = field(default_factory=dict)
    counts: bool = True

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        """Return the body of a request for a streamed answer of at most `tokens` tokens."""
        request: dict[str, Any] = {"stream": True, "max_tokens": tokens} | self.fields
        request |= {"model": self.model} if self.model else {}
        if self.path == CHAT:
            return request | {"messages": [{"role": "user", "content": prompt}]}
        return request | {"prompt": prompt}


def learn(endpoint: Endpoint, model: str | None = None, seed: int = 0) -> Dialect:
    """Return the first dialect that the endpoint answers: completions before chat, all fields before fewer.

    Raises RequestFailed with the server's reason. If it lists several models, the hint names them.
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
            pieces = list(endpoint.stream(path, dialect.body(words(FEW_WORDS, seed - 1), 1)))
            return replace(dialect, counts=any("prompt_tokens" in piece.usage for piece in pieces))
        except RequestFailed as error:
            if error.status not in (*ABSENT, *REFUSED, 500):
                raise
            failed[path] = error
    last = failed[CHAT]
    if len(names) > 1:
        hint = f"name one of its models with --served-model: {name_all(names)}"
        raise QuantkitError(last.message, hint) from last
    raise last
