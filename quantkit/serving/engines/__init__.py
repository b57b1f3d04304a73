"""Programs that run checkpoints, one file each; an engine is imported only when it is used."""

from __future__ import annotations

from quantkit.errors import RESOURCES, QuantkitError


def context_full(tokens: int, context: int) -> QuantkitError:
    """Return the error for a prompt of `tokens` tokens that leaves no room for an answer."""
    message = f"{tokens:,} tokens of conversation leave no room for an answer in a context of {context:,}"
    return QuantkitError(message, "/reset starts again; --ctx sets a larger context", RESOURCES)
