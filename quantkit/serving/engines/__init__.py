"""Programs that run what quantkit made, one file each; none is imported before it is asked for."""

from __future__ import annotations

from quantkit.errors import RESOURCES, QuantkitError


def context_full(tokens: int, context: int) -> QuantkitError:
    """Return the error of a prompt that leaves no room for an answer in the context."""
    message = f"{tokens:,} tokens of conversation leave no room for an answer in a context of {context:,}"
    return QuantkitError(message, "begin anew with /reset, or give more with --ctx", RESOURCES)
