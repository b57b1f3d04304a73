"""A conversation with an engine, turn by turn: what is said and answered, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import psutil

from quantkit.errors import USAGE, QuantkitError, count
from quantkit.evaluation.sampling import Sampling
from quantkit.serving.chat.conversation import Conversation, Prompt
from quantkit.serving.engines import ContextFullError
from quantkit.text import chat

SCHEMA = "quantkit.chat/1"
NEARLY_FULL = 0.9  # of the context: it is said
ROOM = 0.25  # of the context is to be left for an answer, or turns are dropped down to half of it
Stream = Callable[[str], None]


@dataclass(frozen=True)
class Facts:
    """What runs. engine: with its version; kernels: what multiplies by weights. context: tokens at most."""

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
    """prompt_tokens: of the whole conversation; of these `cached_tokens` were there from the turns before.
    dropped_tokens: cached ones that this conversation no longer begins with. decode_seconds: from the
    first new token to the last of `generated_tokens`. stop: end, length (what was asked for), context (it
    is full) or interrupted. kv_bytes: of the cache, None where it is not known."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    dropped_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    stop: str
    kv_bytes: int | None
    notes: tuple[str, ...] = ()

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of the prompt that went through the model."""
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
        """New tokens per second after the first, which comes with the prefill; None of a single one."""
        later = self.generated_tokens - 1
        return later / self.decode_seconds if later > 0 and self.decode_seconds > 0 else None


class Engine(Protocol):
    """A loaded model that answers, and keeps what it has seen."""

    facts: Facts

    def answer(
        self, prompt: Prompt, sampling: Sampling, stream: Stream, stopped: Callable[[], bool]
    ) -> Answer:
        """Answer, handing text on as it comes, until `stopped()`.

        Raises ContextFullError before anything is computed, and QuantkitError for a prompt that does not fit
        the chat template.
        """

    def forget(self) -> None:
        """Free the cache."""

    def close(self) -> None:
        """Free the model."""


def written(template: chat.ChatTemplate, prompt: Prompt) -> str:
    """Return the text of a prompt, up to where the answer begins.

    Raises QuantkitError when it does not fit the template.
    """
    if isinstance(prompt, str):
        return prompt
    try:
        return template.render(chat.Conversation(list(prompt), "the conversation"), answer=True)
    except QuantkitError as error:
        hint = "some take no system message (/system takes it away) or other turns; /reset begins anew"
        raise QuantkitError(error.message, hint, error.exit_code) from error


class Session:
    """drop_oldest: turns are forgotten from the beginning on when the context is full.

    The sampling's seed is that of the first answer; every further one, given again or not, has the next.
    """

    def __init__(
        self, engine: Engine, conversation: Conversation, sampling: Sampling, drop_oldest: bool = False
    ):
        self.engine, self.conversation, self.sampling = engine, conversation, sampling
        self.drop_oldest = drop_oldest
        self.answers = 0
        self._used = 0  # tokens of the conversation
        self.stopped = False

    def stop(self) -> None:
        """End the answer that is being given, after its next token."""
        self.stopped = True

    def say(self, text: str, stream: Stream) -> Answer:
        """The answer to what the user says.

        When there is none (the context is full, the template refuses, it was interrupted before it began) the
        conversation is what it was. Raises QuantkitError for the first two.
        """
        said = [*self.conversation.messages, {"role": "user", "content": text}]
        if self.conversation.raw and not any(message["content"] for message in said):
            raise QuantkitError("there is no text to go on from", "type some", USAGE)
        return self._answer(said, stream)

    def again(self, stream: Stream) -> Answer:
        """Another answer in place of the last one. Raises QuantkitError where there is none."""
        *said, last = self.conversation.messages or [{"role": "none"}]
        if last["role"] != "assistant":
            raise QuantkitError("there is no answer to give again", "say something first", USAGE)
        made = self._answer(said, stream)
        if self.sampling.temperature:
            return made
        return replace(made, notes=(*made.notes, "the likeliest token is always the same: see --temperature"))

    def _answer(self, said: list[dict[str, str]], stream: Stream) -> Answer:
        before, self.conversation.messages = self.conversation.messages, said
        self.stopped = False
        try:
            made = self._fitting(stream)
            if made.stop == "interrupted" and not made.text:
                self.conversation.messages = before
            else:
                self.conversation.say("assistant", made.text)
        except BaseException:
            self.conversation.messages = before
            raise
        self.answers += 1
        return made

    def _fitting(self, stream: Stream) -> Answer:
        sampling = replace(self.sampling, seed=self.sampling.seed + self.answers)
        dropped = self._make_room()
        while True:
            try:
                prompt = self.conversation.prompt()
                made = self.engine.answer(prompt, sampling, stream, lambda: self.stopped)
            except ContextFullError:
                gone = self.conversation.drop_oldest() if self.drop_oldest else 0
                if not gone:
                    raise
                dropped += gone
                continue
            self._used, context = made.used, self.engine.facts.context
            notes = [f"for want of context {count(dropped, 'message')} dropped"] if dropped else []
            notes += made.notes
            if not self.drop_oldest and made.used >= NEARLY_FULL * context:
                full = "is full" if made.stop == "context" else f"is {made.used / context:.0%} full"
                told = f"the context of {context:,} tokens {full}: /reset begins anew, --drop-oldest would"
                notes.append(f"{told} forget")
            return replace(made, notes=tuple(notes))

    def _make_room(self) -> int:
        """Drop the oldest turns before an answer would be cut short; how many messages those were."""
        context = self.engine.facts.context
        if not self.drop_oldest or self._used <= (1 - ROOM) * context:
            return 0
        messages, before = self.conversation.messages, len(self.conversation.messages)
        per_letter = self._used / max(1, _letters(messages))
        while _letters(messages) * per_letter > context / 2 and self.conversation.drop_oldest():
            pass
        return before - len(messages)

    def reset(self) -> None:
        """Forget what was said, and free the cache; the system message stays."""
        self.conversation.messages.clear()
        self._used = 0
        self.engine.forget()

    def memory(self, made: Answer) -> dict[str, int | None]:
        """Bytes of the weights, of the cache, and of this process."""
        process = psutil.Process().memory_info().rss
        return {"weights": self.engine.facts.weight_bytes, "kv_cache": made.kv_bytes, "process": process}

    def record(self, said: str, made: Answer) -> dict[str, Any]:
        """The versioned JSON of a turn."""
        kinds = ("prompt", "cached", "prefilled", "dropped", "generated")
        model = asdict(self.engine.facts)
        del model["weight_bytes"]
        return {
            "schema": SCHEMA,
            "turn": self.answers,
            "said": said,
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


def _letters(messages: Collection[dict[str, str]]) -> int:
    return sum(len(message["content"]) for message in messages)
