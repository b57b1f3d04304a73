"""A target and a draft: whether they go together, and what both take in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.capacity import attention, kv_cache
from quantkit.capacity.settings import Settings as Architecture
from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError
from quantkit.models import kv_types
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.tokenizer_hash import difference, tokenizer_sha256
from quantkit.serving.specdec.settings import Settings
from quantkit.tables import megabytes


@dataclass(frozen=True)
class Footprint:
    """Bytes: of the weights in memory, of keys and values of one text (None where they are not known), and of
    the tensors as they lie on disk. kernels: what multiplies; note: why weights are not packed in memory."""

    weights: int
    kv: int | None
    stored: int
    kernels: str
    note: str = ""


def check_alike(target: Checkpoint, drafts: Sequence[Checkpoint]) -> None:
    """Raise QuantkitError (exit code 4) where a draft's tokens are not the target's, and say in what.

    Logits must be as wide as well: the rule that accepts compares the two distributions number by number.
    """
    size = target.text_config.vocab_size
    own = tokenizer_sha256(target.tokenizer, size)
    for draft in drafts:
        other = draft.text_config.vocab_size
        if tokenizer_sha256(draft.tokenizer, other) != own:
            found = difference(target.tokenizer, draft.tokenizer, (size, other))
            raise QuantkitError(
                f"{draft.source} cannot draft for {target.source}: {found}",
                "choose a smaller model of its family, a compressed copy of it, or prompt-lookup",
                UNSUPPORTED,
            )
        if size != other:
            raise QuantkitError(
                f"{draft.source} cannot draft for {target.source}: its embedding has {other} rows instead of "
                f"{size}, though the tokens are the same",
                "choose a draft of the same width, such as a compressed copy of the target",
                UNSUPPORTED,
            )


def check_context(checkpoints: Sequence[Checkpoint], settings: Settings) -> None:
    """Raise QuantkitError (exit code 2) where prompt and new tokens are more than a model was made for."""
    needed = settings.prompt_tokens + settings.tokens
    for checkpoint in checkpoints:
        context = checkpoint.context
        if context is not None and needed > context:
            raise QuantkitError(
                f"{checkpoint.source} was made for {context} tokens; prompt and new tokens make {needed}",
                f"choose --prompt-tokens and --tokens of at most {context} together",
                USAGE,
            )


def warnings(target: Checkpoint, draft: Checkpoint, sizes: tuple[Footprint, Footprint]) -> list[str]:
    """What makes a draft unlikely to pay, before it is tried. sizes: of target and draft."""
    big, small = sizes
    if small.weights > big.weights:
        return [
            f"{draft.source} ({megabytes(small.weights)} in memory) is larger than its target "
            f"{target.source} ({megabytes(big.weights)}): it cannot draft faster than the target writes"
        ]
    if small.weights == big.weights and small.note:
        return [
            f"{draft.source} lies decoded in memory, as large as the target ({small.note}): drafting a token "
            "takes as long as writing one"
        ]
    return []


def kv_bytes(checkpoint: Checkpoint, tokens: int, dtype: str) -> int | None:
    """Keys and values of one text of so many tokens; None for architectures whose cache is not known."""
    try:
        caches = attention.layer_caches(Architecture.of(checkpoint.config.to_dict()))
    except attention.Unsupported:
        return None
    return kv_cache.sequence_bytes(caches, tokens, kv_types.TYPES[dtype].nbytes)


def stored_bytes(checkpoint: Checkpoint) -> int:
    """Of all tensors as they lie on disk: what a step reads where kernels multiply by them packed."""
    return sum(info.nbytes for info in checkpoint.infos.values())
