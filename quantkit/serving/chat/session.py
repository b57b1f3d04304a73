"""A conversation with an engine, turn by turn: messages, answers, and their cost.

A saved conversation is a line of JSON, {"messages": [{"role", "content"}, …]} or {"text": …} of a raw one:
what `--calibration FILE.jsonl` takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from quantkit.errors import USAGE, QuantkitError, require
from quantkit.evaluation.sampling import Sampling
from quantkit.text import chat

SCHEMA = "quantkit.chat/2"
NEARLY_FULL = 0.9  # share of the context from which on a note is added
Stream = Callable[[str], None]
Prompt = Sequence[Mapping[str, str]] | str  # messages for the chat template, or text to go on from


@dataclass
class Conversation:
    """messages: users' and answers, in turn. raw: no roles, one text that user and model continue."""

    system: str = ""
    raw: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)

    def prompt(self) -> Prompt:
        """Return the text of a raw conversation, else its messages, the system's first."""
        if self.raw:
            return "".join(message["content"] for message in self.messages)
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.messages]

    def save(self, path: Path) -> None:
        """Add the conversation to a .jsonl file as a line.

        Raises QuantkitError for an empty conversation, another kind of file, and where it cannot be written.
        """
        require(self.messages, "the conversation is empty", "send a message first", USAGE)
        if path.suffix != ".jsonl":
            raise QuantkitError(f"{path} is not a .jsonl file", "for example /save talk.jsonl", USAGE)
        row = {"text" if self.raw else "messages": self.prompt()}
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except (OSError, ValueError) as error:  # a name with a NUL, or letters that the locale lacks
            raise QuantkitError(f"{path} cannot be written: {error}", "save elsewhere") from error


@dataclass(frozen=True)
class Facts:
    """The running model. engine: with its version; kernels: the class of linears. context: tokens at most."""

    source: str
    engine: str
    kernels: str
    device: str
    dtype: str
    context: int
    weight_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """prompt_tokens: of the whole conversation; `cached_tokens` of them from former turns.
    decode_seconds: from the first new token to the last of `generated_tokens`. stop: end, length (the
    limit of tokens), context (full) or interrupted; engines set the first. kv_bytes: of the cache, None
    where unknown."""

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
        """Tokens of the prompt that were computed."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def used(self) -> int:
        """Tokens of the conversation."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def prefill_rate(self) -> float:
        """Tokens of the prompt per second."""
        return self.prefilled_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_rate(self) -> float | None:
        """New tokens per second after the first, which comes with the prefill; None for a single one."""
        later = self.generated_tokens - 1
        return later / self.decode_seconds if later > 0 and self.decode_seconds > 0 else None


def written(template: chat.ChatTemplate, prompt: Prompt) -> str:
    """Return the text of a prompt, up to the beginning of the answer.

    Raises QuantkitError for messages that do not fit the template.
    """
    if isinstance(prompt, str):
        return prompt
    try:
        return template.render(chat.Conversation(list(prompt), "the conversation"), answer=True)
    except QuantkitError as error:
        hint = (
            "some templates take no system message (/system removes it) or other turns; /reset starts again"
        )
        raise QuantkitError(error.message, hint, error.exit_code) from error


class Session:
    """A conversation that an engine answers: a `TransformersChat` or a `LlamaCppChat`. The sampling's seed is
    that of the first answer; every further one, given again or not, has the next."""

    def __init__(self, engine: Any, conversation: Conversation, sampling: Sampling):
        self.engine, self.conversation, self.sampling = engine, conversation, sampling
        self.answers = 0
        self.stopped = False

    def stop(self) -> None:
        """Stop the current answer after its next token."""
        self.stopped = True

    def say(self, text: str, stream: Stream) -> Answer:
        """Return the answer to a message of the user.

        Without an answer (full context, refused by the template, interrupted before the first token) the
        conversation stays as it was. Raises QuantkitError for the first two.
        """
        messages = [*self.conversation.messages, {"role": "user", "content": text}]
        if self.conversation.raw and not any(message["content"] for message in messages):
            raise QuantkitError("there is no text to continue", "type some text", USAGE)
        return self._answer(messages, stream)

    def again(self, stream: Stream) -> Answer:
        """Replace the last answer by another one. Raises QuantkitError where there is none."""
        *messages, last = self.conversation.messages or [{"role": "none"}]
        require(last["role"] == "assistant", "there is no answer to replace", "send a message first", USAGE)
        made = self._answer(messages, stream)
        if self.sampling.temperature:
            return made
        return replace(made, notes=(*made.notes, "without --temperature the answer is the same"))

    def _answer(self, messages: list[dict[str, str]], stream: Stream) -> Answer:
        before, self.conversation.messages = self.conversation.messages, messages
        sampling = replace(self.sampling, seed=self.sampling.seed + self.answers)
        self.stopped, answered = False, False
        try:
            made = self.engine.answer(self.conversation.prompt(), sampling, stream, lambda: self.stopped)
            cut = "interrupted" if self.stopped else "context"
            cut = "length" if made.generated_tokens >= sampling.tokens else cut
            made = replace(made, stop=made.stop or cut)
            answered = made.stop != "interrupted" or bool(made.text)
        finally:
            if not answered:
                self.conversation.messages = before
        if answered:
            self.conversation.messages.append({"role": "assistant", "content": made.text})
        self.answers += 1
        share = made.used / (context := self.engine.facts.context)
        if share < NEARLY_FULL:
            return made
        note = f"{share:.0%} of the context of {context:,} tokens are used: /reset starts again"
        return replace(made, notes=(*made.notes, note))

    def reset(self) -> None:
        """Remove all messages but the system message."""
        self.conversation.messages.clear()

    def memory(self, made: Answer) -> dict[str, int | None]:
        """Return the bytes of the weights, of the cache, and of this process."""
        process = psutil.Process().memory_info().rss
        return {"weights": self.engine.facts.weight_bytes, "kv_cache": made.kv_bytes, "process": process}

    def record(self, message: str, made: Answer) -> dict[str, Any]:
        """Return the versioned JSON of a turn."""
        kinds = ("prompt", "cached", "prefilled", "generated")
        model = asdict(self.engine.facts)
        del model["weight_bytes"]
        return {
            "schema": SCHEMA,
            "turn": self.answers,
            "said": message,
            "text": made.text,
            "stop": made.stop,
            "tokens": {kind: getattr(made, f"{kind}_tokens") for kind in kinds},
            "seconds": {"prefill": made.prefill_seconds, "decode": made.decode_seconds},
            "tokens_per_second": {"prefill": made.prefill_rate, "decode": made.decode_rate},
            "memory_bytes": self.memory(made),
            "notes": made.notes,
            "model": model,
            "sampling": asdict(self.sampling) | {"seed": self.sampling.seed + self.answers - 1},
        }
