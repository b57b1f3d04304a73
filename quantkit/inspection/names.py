"""What the name of a parameter says: its part of the model, its block. Checkpoints' names, and GGUF's."""

from __future__ import annotations

import re

PARTS = {  # the first that matches a name counts
    "head": r"^(model\.)?(lm_head|embed_out|output)\.",
    "norms": r"norm|(^|[._])ln(_|\d|\.)",
    "embeddings": r"^(?!.*\.\d+\.).*(embed|wte\.|wpe\.|token_embd|position_embd)",
    "attention": r"attn|attention",
    "mlp": r"mlp|ffn|feed_forward|fc\d|expert",
    "other": r"",
}
IN_BLOCK = re.compile(r"^(?P<stack>.*?)\.(?P<block>\d+)\.(?P<local>.*)$")
INPUT_EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|word_embeddings|wte|embed_in|token_embd)\.weight$")


def part_of(name: str) -> str:
    """The part of a model that a parameter belongs to."""
    return next(part for part, pattern in PARTS.items() if re.search(pattern, name))


def split(name: str) -> tuple[int | None, str]:
    """Block and name inside it; None and the name itself outside the blocks."""
    found = IN_BLOCK.match(name)
    return (int(found["block"]), found["local"]) if found else (None, name)


def is_linear(name: str, shape: tuple[int, ...] | None) -> bool:
    """Whether this is a matrix of a block, as methods quantize them."""
    return split(name)[0] is not None and name.endswith(".weight") and len(shape or ()) == 2
