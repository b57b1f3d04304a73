"""Modules next to the language model: towers of other modalities, projectors, prediction heads.

Text does not enter a tower, so it is never loaded; a stand-in shows its attributes to the model. All of it is
copied byte for byte, and clients learn by name what is not quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton.names import Names


class StandIn(nn.Module):
    """A stand-in with the attributes of a module, whose weights stay on the meta device, or come and go."""

    def __init__(self, whole: nn.Module):
        super().__init__()
        self.__dict__["whole"] = whole  # not a child: its weights are not the model's to move

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["whole"], name)


def set_aside(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Put stand-ins in the places of these towers; returns the towers."""
    towers = {name: model.get_submodule(name) for name in names}
    for name, tower in towers.items():
        model.set_submodule(name, StandIn(tower))
    return towers


@dataclass(frozen=True)
class CopiedModule:
    """A module that is copied byte for byte, by its stored name; its bytes on disk.

    spellings: what clients may call it. transformers has names of its own, and engines drop a prefix like
    `model.` but keep the last part.
    """

    name: str
    spellings: tuple[str, ...]
    nbytes: int


def copied_modules(model: nn.Module, names: Names, checkpoint: Checkpoint) -> list[CopiedModule]:
    """Return the outermost modules next to the language model and its head, in the order of their names:
    towers, projectors, and modules that transformers does not build, such as heads that predict further
    tokens. Empty for a model of text alone that is stored as transformers builds it.
    """
    head = model.get_output_embeddings()
    heads = tuple(f"{name}." for name, module in model.named_modules() if module is head)
    built = {stored: name for name, stored in names.stored.items()}
    inside = f"{names.language}." if names.language else ""
    text = {stored for stored, name in built.items() if name.startswith((inside, *heads))}
    text |= {stored for stored in checkpoint.names if stored.startswith(names.stored_blocks)}
    spoken = text | {built[stored] for stored in text & built.keys()}  # none of these names may be matched
    above = set(_above(spoken))
    found: dict[str, CopiedModule] = {}
    for stored in sorted(set(checkpoint.names) - text):
        root, module = _outermost(stored, above), _outermost(built.get(stored, ""), above)
        if root is None or (stored not in built and not stored.endswith(".weight")):  # a stale buffer
            continue
        nbytes = sum(checkpoint.infos[part].nbytes for part in checkpoint.stored_as(stored))
        leaf = root.rpartition(".")[2]
        short = () if leaf.isdecimal() or any(leaf in name for name in spoken) else (leaf,)
        known = found.get(root, CopiedModule(root, (root, *short), 0))
        spellings = dict.fromkeys((*known.spellings, *([module] if module else [])))
        found[root] = CopiedModule(root, tuple(spellings), known.nbytes + nbytes)
    return list(found.values())


def _above(names: Iterable[str]) -> Iterator[str]:
    """Yield all modules around these tensors."""
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[:end]) for end in range(1, len(parts)))


def _outermost(name: str, above: set[str]) -> str | None:
    """Return the outermost module around a tensor that is none of `above`; None if there is none."""
    return next((module for module in _above([name]) if module not in above), None)
