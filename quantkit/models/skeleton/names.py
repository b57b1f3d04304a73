"""Names: map the model's parameters to the checkpoint's tensors, and check that all are there.

A checkpoint may hold more than the language model: towers of other modalities, projectors, prediction heads.
Text does not enter a tower, so it is never loaded; a stand-in with its attributes replaces it. All these
tensors are copied byte for byte, and the configuration names them as not quantized.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from quantkit.errors import UNSUPPORTED, count, name_all, require
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.untrusted import CODED
from quantkit.models.skeleton import meta_model


class Names:
    """Names of tensors. blocks: name of the list of decoder blocks. stored: name in the model -> in the
    checkpoint. joined: name in the model -> names of its concatenated parts in the checkpoint. shapes: of all
    parameters, by name in the model. transposed: weights stored as `[in, out]`. language: name of the
    language model in a wrapper, or "". towers: names of the wrapper's other models; never loaded.
    above_head: what comes before the head's own name, such as "language_model."."""

    def __init__(self, model: nn.Module, blocks: str, transposed: set[str], checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self.blocks = blocks
        self.transposed = transposed
        self.stored = meta_model.resolve_names(model, checkpoint.names)
        self.joined = meta_model.joined_names(model, checkpoint.names)
        self.shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        self._twice = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self._tied = model.all_tied_weights_keys
        self._depth = len(model.get_submodule(blocks))
        self.above_head = ""
        self.language = meta_model.language_model(model, checkpoint)
        self.towers = meta_model.towers(model, self.language)

    def of_block(self, index: int, local: str) -> str:
        """Return the model's name of `local` in block `index`; the head is the last block."""
        return f"{self.blocks}.{index}.{local}" if index < self._depth else f"{self.above_head}{local}"

    def stored_of(self, index: int, local: str) -> str:
        """Return the checkpoint's name of `local` in block `index`."""
        return self.stored[self.of_block(index, local)]

    @property
    def stored_blocks(self) -> tuple[str, ...]:
        """Return the prefix of each block's names in the checkpoint."""
        first = f"{self.blocks}.0."
        equal = (
            stored.removesuffix(name.removeprefix(first)).removesuffix("0.")
            for name, stored in self.stored.items()
            if name.startswith(first) and stored.endswith(f".0.{name.removeprefix(first)}")
        )
        container = next(equal, f"{self.blocks}.")
        return tuple(f"{container}{index}." for index in range(self._depth))

    def in_tower(self, name: str) -> bool:
        """Return whether a parameter belongs to a tower of another modality."""
        return name.startswith(tuple(f"{tower}." for tower in self.towers))

    def missing(self) -> list[str]:
        """Return the model's parameters that neither the checkpoint nor a tied tensor provides."""
        ties = self._tied.items()  # either of two tied names provides the other
        provided = {name for pair in ties if self.stored.keys() & set(pair) for name in pair}
        provided |= self.stored.keys() | self.joined.keys() | self._tied.keys()
        return sorted({name for name in self._twice if not self.in_tower(name)} - provided)

    def check_complete(self) -> None:
        """Raise QuantkitError naming every parameter that is missing, misshapen, packed although it is not a
        linear, or shared by several blocks."""
        refuse_absent(self.missing())
        stored = {name: self.stored[name] for name in self.shapes if name in self.stored}
        types = {name: self._checkpoint.plain_dtype(name) for name in stored.values()}
        coded = [f"{name} ({dtype})" for name, dtype in types.items() if dtype in CODED]
        what = f"quantized already, in an unknown form: {name_all(coded)}"
        hint = "start from the original checkpoint, whose routers and other such parameters are floats"
        require(not coded, what, hint, UNSUPPORTED)
        inside = f"{self.blocks}."
        shared = sorted(name for name in self._tied if name.startswith(inside) and name not in self.stored)
        what = f"blocks share {count(len(shared), 'weight')}: {name_all(shared)}"
        hint = "quantkit gives each block codes of its own: it does not compress these models yet"
        require(not shared, what, hint, UNSUPPORTED)
        misshapen = []
        for name in sorted(stored, key=lambda name: not name.startswith(inside)):
            if self._checkpoint.is_quantized(stored[name]) or self.in_tower(name):
                continue  # shapes of packed linears are checked when they are decoded
            shape = list(self._checkpoint.infos[stored[name]].shape)
            shape = shape[::-1] if name in self.transposed else shape
            if shape != self.shapes[name]:
                what = f"{stored[name]} is {shape}, the configuration says {self.shapes[name]}"
                misshapen.append(what)
        what = "; ".join(misshapen[:8]) + (f"; and {len(misshapen) - 8} more" if misshapen[8:] else "")
        require(not misshapen, what, "config.json and weights belong to different models")


def refuse_absent(names: Sequence[str]) -> None:
    """Raise QuantkitError naming the tensors of the model that a checkpoint lacks, if there are any."""
    what = f"the checkpoint lacks {count(len(names), 'tensor')} of the model: {name_all(names)}"
    require(not names, what, "the download is incomplete, or config.json belongs to another model")


# ---- next to the language model


class StandIn(nn.Module):
    """A module with the attributes of another module, but without its weights."""

    def __init__(self, whole: nn.Module):
        super().__init__()
        self.__dict__["whole"] = whole  # not a child: the model must not move its weights

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["whole"], name)


def set_aside(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Replace these towers by stand-ins. Returns the towers by name."""
    towers = {name: model.get_submodule(name) for name in names}
    for name, tower in towers.items():
        model.set_submodule(name, StandIn(tower))
    return towers


@dataclass(frozen=True)
class CopiedModule:
    """A module that is copied byte for byte. name: in the checkpoint; nbytes: on disk.

    spellings: names that clients may use: transformers renames modules, and engines drop a prefix such as
    `model.` but keep the last part.
    """

    name: str
    spellings: tuple[str, ...]
    nbytes: int


def copied_modules(model: nn.Module, names: Names, checkpoint: Checkpoint) -> list[CopiedModule]:
    """Return the outermost modules besides the language model and its head, sorted by name: towers,
    projectors, and modules that transformers does not build, such as heads that predict further tokens. Empty
    for a text-only model that transformers builds completely."""
    head = model.get_output_embeddings()
    heads = tuple(f"{name}." for name, module in model.named_modules() if module is head)
    built = {stored: name for name, stored in names.stored.items()}
    inside = f"{names.language}." if names.language else ""
    text = {stored for stored, name in built.items() if name.startswith((inside, *heads))}
    text |= {stored for stored in checkpoint.names if stored.startswith(names.stored_blocks)}
    spoken = text | {built[stored] for stored in text & built.keys()}  # none of these names may be matched
    above = set(_above(spoken))
    modules: dict[str, CopiedModule] = {}
    for stored in sorted(set(checkpoint.names) - text):
        root, module = _outermost(stored, above), _outermost(built.get(stored, ""), above)
        if root is None or (stored not in built and not stored.endswith(".weight")):  # a stale buffer
            continue
        nbytes = sum(checkpoint.infos[key].nbytes for key in checkpoint.stored_as(stored))
        leaf = root.rpartition(".")[2]
        short = () if leaf.isdecimal() or any(leaf in name for name in spoken) else (leaf,)
        earlier = modules.get(root, CopiedModule(root, (root, *short), 0))
        spellings = dict.fromkeys((*earlier.spellings, *([module] if module else [])))
        modules[root] = CopiedModule(root, tuple(spellings), earlier.nbytes + nbytes)
    return list(modules.values())


def _above(names: Iterable[str]) -> Iterator[str]:
    """Yield the names of all modules that contain these tensors."""
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[:end]) for end in range(1, len(parts)))


def _outermost(name: str, above: set[str]) -> str | None:
    """Return the outermost module that contains a tensor and is not in `above`; None if there is none."""
    return next((module for module in _above([name]) if module not in above), None)
