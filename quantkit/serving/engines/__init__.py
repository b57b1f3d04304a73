"""Programs that run what quantkit made, one file each; none is imported before it is asked for."""

from __future__ import annotations

from quantkit.errors import RESOURCES, QuantkitError


class ContextFullError(QuantkitError):
    """A prompt of so many `tokens` leaves no room for an answer in a `context` of so many."""

    def __init__(self, tokens: int, context: int):
        super().__init__(
            f"the conversation is {tokens:,} tokens, the context {context:,}: there is no room for an answer",
            "begin anew with /reset, let --drop-oldest forget the oldest turns, or give more with --ctx",
            RESOURCES,
        )
        self.tokens, self.context = tokens, context
