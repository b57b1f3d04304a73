"""Parses names of parameters, in checkpoints and GGUF files, and of a number in config.json."""

import re
from collections.abc import Iterable

from quantkit.models.files.head import EMBEDDING

PARTS = {  # the first pattern that matches a name counts
    "head": r"^(model\.)?(lm_head|embed_out|output)\.|\.lm_head\.",
    "norms": r"norm|(^|[._])ln(_|\d|\.)",
    "embeddings": r"^(?!.*\.\d+\.).*(embed|wte\.|wpe\.|token_embd|position_embd)",
    "attention": r"attn|attention",
    "mlp": r"mlp|ffn|feed_forward|fc\d|expert",
    "other": r"",
}
IN_BLOCK = re.compile(r"^(?P<stack>.*?)\.(?P<block>\d+)\.(?P<local>.*)$")
# Names of one number of config.json: how many tokens the model was made for.
CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "n_ctx",
    "seq_length",
)
EXPERT = re.compile(r"\bexperts\.\d+\.")


def part_of(name: str) -> str:
    """Return the part of the model that a parameter belongs to: a key of PARTS, such as `head`."""
    return next(key for key, pattern in PARTS.items() if re.search(pattern, name))


def split(name: str) -> tuple[str | None, int | None, str]:
    """Return (stack of blocks, block, name inside the block), such as (`model.layers`, 3, `mlp.up_proj`);
    (None, None, name) outside the blocks."""
    match = IN_BLOCK.match(name)
    return (match["stack"], int(match["block"]), match["local"]) if match else (None, None, name)


def starred(name: str) -> tuple[str, int | None]:
    """Split `visual.blocks.3.attn.qkv` into (`visual.blocks.*.attn.qkv`, 3); outside the blocks, return
    (name, None)."""
    stack, block, local = split(name)
    return (name, None) if block is None else (f"{stack}.*.{local}", block)


def of_experts(name: str) -> str:
    """Replace the number of an expert: `mlp.experts.3.up_proj.weight` to `mlp.experts.*.up_proj.weight`."""
    return EXPERT.sub("experts.*.", name)


def parent(name: str) -> str:
    """Return the name's prefix up to its last dot: `model.` for `model.layers`, "" for `layers`."""
    return "".join(name.rpartition(".")[:2])


def language_stack(names: Iterable[str]) -> str | None:
    """Return the stack of blocks of the language model: the only stack, or the only one whose prefix also has
    input embeddings. None if several or none are left."""
    names = list(names)
    stacks = {stack for stack, *_ in map(split, names) if stack is not None}
    if len(stacks) > 1:
        near = {parent(name.removesuffix(".weight")) for name in names if EMBEDDING.fullmatch(name)}
        stacks = {stack for stack in stacks if parent(stack) in near}
    return stacks.pop() if len(stacks) == 1 else None


def is_linear(name: str, shape: tuple[int, ...] | None) -> bool:
    """Return whether a parameter is a matrix in a block that methods quantize."""
    return split(name)[1] is not None and name.endswith(".weight") and len(shape or ()) == 2
