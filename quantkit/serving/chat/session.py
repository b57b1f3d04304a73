"""A conversation with an engine, turn by turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil

from quantkit.errors import USAGE, QuantkitError, count
from quantkit.evaluation.sampling import Sampling
from quantkit.serving.chat.conversation import Conversation
from quantkit.serving.chat.turn import Answer, Engine, Stream
from quantkit.serving.context import ContextFullError

SCHEMA = "quantkit.chat/1"
NEARLY_FULL = 0.9  # of the context: it is said
ROOM = 0.25  # of the context is to be left for an answer, or turns are dropped down to half of it


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
        before = list(self.conversation.messages)
        self.conversation.say("user", text)
        if not self.conversation.prompt():
            self.conversation.messages = before
            raise QuantkitError("there is no text to go on from", "type some", USAGE)
        return self._answer(before, stream)

    def again(self, stream: Stream) -> Answer:
        """Another answer in place of the last one."""
        before = list(self.conversation.messages)
        self.conversation.take_back_answer()
        made = self._answer(before, stream)
        if self.sampling.temperature:
            return made
        return replace(made, notes=(*made.notes, "the likeliest token is always the same: see --temperature"))

    def _answer(self, before: list[dict[str, str]], stream: Stream) -> Answer:
        self.stopped = False
        sampling = replace(self.sampling, seed=self.sampling.seed + self.answers)
        try:
            made = self._fitting(sampling, stream, lambda: self.stopped)
        except BaseException:
            self.conversation.messages = before
            raise
        self.answers += 1
        if made.stop == "interrupted" and not made.text:
            self.conversation.messages = before
        else:
            self.conversation.say("assistant", made.text)
        return made

    def _fitting(self, sampling: Sampling, stream: Stream, stopped: Callable[[], bool]) -> Answer:
        dropped = self._make_room()
        while True:
            try:
                made = self.engine.answer(self.conversation.prompt(), sampling, stream, stopped)
            except ContextFullError:
                gone = self.conversation.drop_oldest() if self.drop_oldest else 0
                if not gone:
                    raise
                dropped += gone
                continue
            self._used = made.prompt_tokens + made.generated_tokens
            notes = (f"for want of context {count(dropped, 'message')} dropped",) if dropped else ()
            return replace(made, notes=(*notes, *made.notes, *self._outlook(made)))

    def _make_room(self) -> int:
        """Drop the oldest turns before an answer would be cut short; how many messages those were."""
        context = self.engine.facts.context
        if not self.drop_oldest or self._used <= (1 - ROOM) * context:
            return 0
        messages, before = self.conversation.messages, len(self.conversation.messages)
        per_letter = self._used / max(1, sum(len(message["content"]) for message in messages))
        while sum(len(message["content"]) for message in messages) * per_letter > context / 2:
            if not self.conversation.drop_oldest():
                break
        return before - len(messages)

    def _outlook(self, made: Answer) -> tuple[str, ...]:
        used, context = made.prompt_tokens + made.generated_tokens, self.engine.facts.context
        if self.drop_oldest or used < NEARLY_FULL * context:
            return ()
        full = "is full" if made.stop == "context" else f"is {used / context:.0%} full"
        return (f"the context of {context:,} tokens {full}: /reset begins anew, --drop-oldest would forget",)

    def reset(self) -> None:
        """Forget what was said, and free the cache."""
        self.conversation.reset()
        self._used = 0
        self.engine.forget()

    def memory(self, made: Answer) -> dict[str, int | None]:
        """Bytes of the weights, of the cache, and of this process."""
        process = psutil.Process().memory_info().rss
        return {"weights": self.engine.facts.weight_bytes, "kv_cache": made.kv_bytes, "process": process}

    def record(self, said: str, made: Answer) -> dict[str, Any]:
        """The versioned JSON of a turn."""
        facts = self.engine.facts
        return {
            "schema": SCHEMA,
            "turn": self.answers,
            "said": said,
            **made.record(),
            "memory_bytes": self.memory(made),
            "notes": list(made.notes),
            "model": {
                "source": facts.source,
                "engine": facts.engine,
                "kernels": facts.kernels,
                "dtype": facts.dtype,
                "device": facts.device,
                "context": facts.context,
                "notes": list(facts.notes),
            },
            "sampling": {
                "temperature": self.sampling.temperature,
                "top_k": self.sampling.top_k,
                "top_p": self.sampling.top_p,
                "seed": self.sampling.seed + self.answers - 1,
                "tokens": self.sampling.tokens,
            },
        }
