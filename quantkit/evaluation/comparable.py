"""Whether checkpoints can be compared: the same text must be the same tokens to all of them."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.tokenizer_hash import difference, tokenizer_sha256


def check_comparable(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise QuantkitError unless all checkpoints read a text as the same tokens and predict the same ones."""
    first, *others = checkpoints
    hashes = [tokenizer_sha256(c.tokenizer, c.config.vocab_size) for c in checkpoints] if others else []
    for other, found in zip(others, hashes[1:], strict=True):
        sizes = first.config.vocab_size, other.config.vocab_size
        if found != hashes[0]:
            raise QuantkitError(
                f"{other.source} and {first.source} have different tokenizers: "
                + difference(first.tokenizer, other.tokenizer, sizes),
                hint="perplexities over different tokens cannot be compared: evaluate them one by one",
                exit_code=UNSUPPORTED,
            )
        if sizes[0] != sizes[1]:
            raise QuantkitError(
                f"{first.source} predicts {sizes[0]} tokens, {other.source} {sizes[1]}",
                hint="a divergence over different vocabularies is not defined: evaluate them one by one",
                exit_code=UNSUPPORTED,
            )
