"""A conversation with an engine, turn by turn: messages, answers, and their cost.

A saved conversation is a line of JSON: {"messages": [{"role", "content"}, …]}, or {"text": …} if it is raw.
`--calibration FILE.jsonl` reads such files.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.errors import USAGE, QuantkitError, require
from quantkit.evaluation.sampling import Sampling
from quantkit.models.machine.memory import resident
from quantkit.text import chat

SCHEMA = "quantkit.chat/2"
NEARLY_FULL = 0.9  # share of the context above which a note is added
Stream = Callable[[str], None]
Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    """An answer and its cost. prompt_tokens: tokens of the conversation before the answer. cached_tokens: how
    many of these were in the cache. decode_seconds: time from the first new token to the last. stop: `end`,
    `length` (token limit), `context` (full) or `interrupted`; engines set only `end`. kv_bytes: size of the
    cache, None if unknown."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    stop: str | None
    kv_bytes: int | None
    notes: tuple[str, ...] = ()

    @property
    def prefilled_tokens(self) -> int:
        """Number of prompt tokens that were not cached."""
        return self.prompt_tokens - self.cached_tokens


class ChatSession:
    """A conversation that an engine answers.

    engine: a `TransformersChat` or a `LlamaCppChat`: its name, `facts` (EngineFacts), context in tokens and
    chat template, and the model's source. raw: there are no roles; user and model continue one text.
    messages: the user's and the model's, in turn. stopped: True ends the current answer after its next token.
    The first answer uses the seed of `sampling`; each further one, also after /retry, adds 1.
    """

    def __init__(self, engine: Any, sampling: Sampling, system: str = "", raw: bool = False):
        self.engine, self.sampling, self.system, self.raw = engine, sampling, system, raw
        self.messages: list[dict[str, str]] = []
        self.answers = 0
        self.stopped = False

    def say(self, text: str, stream: Stream) -> Answer:
        """Answer the user's message `text`. stream: receives the text as it is generated.

        Raises QuantkitError if the context is full or the chat template rejects the message. Then, and if
        the answer is interrupted before its first token, the conversation does not change.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        require(not self.raw or _text(messages), "there is no text to continue", "type some text", USAGE)
        return self._answer(messages, stream)

    def again(self, stream: Stream) -> Answer:
        """Replace the last answer by a new one. Raises QuantkitError if there is no answer yet."""
        *messages, last = self.messages or [{"role": "none"}]
        require(last["role"] == "assistant", "there is no answer to replace", "send a message first", USAGE)
        answer = self._answer(messages, stream)
        if self.sampling.temperature:
            return answer
        return replace(answer, notes=(*answer.notes, "without --temperature the answer is the same"))

    def _answer(self, messages: Messages, stream: Stream) -> Answer:
        sampling = replace(self.sampling, seed=self.sampling.seed + self.answers)
        self.stopped = False
        answer = self.engine.answer(self._prompt(messages), self.raw, sampling, stream, lambda: self.stopped)
        cut = "interrupted" if self.stopped else "context"
        cut = "length" if answer.generated_tokens >= sampling.tokens else cut
        answer = replace(answer, stop=answer.stop or cut)
        if answer.stop != "interrupted" or answer.text:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.answers += 1
        context = self.engine.context
        share = (answer.prompt_tokens + answer.generated_tokens) / context
        if share < NEARLY_FULL:
            return answer
        note = f"{share:.0%} of the context of {context:,} tokens are used: /reset starts again"
        return replace(answer, notes=(*answer.notes, note))

    def _prompt(self, messages: Messages) -> str:
        """Return the text that the engine continues. Raises QuantkitError for messages that the chat template
        rejects."""
        if self.raw:
            return _text(messages)
        try:
            conversation = chat.Conversation(self._with_system(messages), "the conversation")
            return self.engine.template.render(conversation, answer=True)
        except QuantkitError as error:
            hint = "some templates take no system message (/system removes it) or other turns"
            raise QuantkitError(error.message, f"{hint}; /reset starts anew", error.exit_code) from error

    def _with_system(self, messages: Messages) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *messages]

    def save(self, path: Path) -> None:
        """Append the conversation to a .jsonl file as one line.

        Raises QuantkitError if the conversation is empty, or the file has another suffix or is not writable.
        """
        require(self.messages, "the conversation is empty", "send a message first", USAGE)
        what, hint = f"{path} is not a .jsonl file", "for example /save talk.jsonl"
        require(path.suffix == ".jsonl", what, hint, USAGE)
        row = {"text": _text(self.messages)} if self.raw else {"messages": self._with_system(self.messages)}
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except (OSError, ValueError) as error:  # a name with a NUL, or letters that the locale lacks
            raise QuantkitError(f"{path} cannot be written: {error}", "save elsewhere") from error

    def record(self, message: str, answer: Answer) -> dict[str, Any]:
        """Return the versioned JSON of a message and its answer. The prefill computes the first new token, so
        the decoding speed counts the later ones; it is None for a single token."""
        kinds = ("prompt", "cached", "prefilled", "generated")
        engine, facts, later = self.engine, self.engine.facts, answer.generated_tokens - 1
        prefill, decode = answer.prefill_seconds, answer.decode_seconds
        return {
            "schema": SCHEMA,
            "turn": self.answers,
            "said": message,
            "text": answer.text,
            "stop": answer.stop,
            "tokens": {kind: getattr(answer, f"{kind}_tokens") for kind in kinds},
            "seconds": {"prefill": prefill, "decode": decode},
            "tokens_per_second": {
                "prefill": answer.prefilled_tokens / max(prefill, 1e-9),
                "decode": later / decode if later > 0 and decode > 0 else None,
            },
            "memory_bytes": {
                "weights": facts.weight_bytes,
                "kv_cache": answer.kv_bytes,
                "process": resident(),
            },
            "notes": answer.notes,
            "model": {
                "source": engine.source,
                "engine": engine.name,
                "kernels": facts.kernels,
                "device": facts.device,
                "dtype": facts.dtype,
                "context": engine.context,
                "notes": [facts.note] if facts.note else [],
            },
            "sampling": asdict(self.sampling) | {"seed": self.sampling.seed + self.answers - 1},
        }


def _text(messages: Messages) -> str:
    return "".join(message["content"] for message in messages)
