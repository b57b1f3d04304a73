"""Decides what the head of a checkpoint is, once, when it is opened: its embedding, or a matrix of its own.

A configuration may tie the head to the embedding although both are stored. If they are equal, as in
Qwen3-0.6B, the copy is left out. If they differ, transformers uses both, whatever the configuration says. A
tied matrix that is stored only under the head's name gets the embedding's.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from quantkit.models.files.safetensors_folder import TensorInfo, raw

HEADS = r"(?:.*\.)?(?:lm_head|embed_out)|(?:model\.)?output"  # modules outside the blocks
EMBEDDINGS = r"(?:.*\.)?(?:embed_tokens|word_embeddings|wte|embed_in|token_embd)"
HEAD, EMBEDDING = (re.compile(rf"({modules})\.weight") for modules in (HEADS, EMBEDDINGS))
IN_BLOCK = re.compile(r"\.\d+\.")
Infos = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Head:
    """kind: `tied`, only the embedding is stored; `copy`, an equal head is stored as well; `alone`, the tied
    matrix has the head's name; `own`, a matrix of its own; `unlike`, the same although config.json ties it.

    module: stored name of the head; "" if none is stored. infos: tensors of its weight.
    """

    kind: str
    module: str = ""
    infos: tuple[TensorInfo, ...] = ()

    @property
    def tied(self) -> bool:
        """Return whether head and embedding are one matrix."""
        return self.kind not in ("own", "unlike")

    @property
    def packed(self) -> bool:
        """Return whether the head is stored as codes."""
        return any(info.name != f"{self.module}.weight" for info in self.infos)

    @property
    def note(self) -> str:
        """Return a sentence if the files contradict the configuration, else ""."""
        nbytes = sum(info.nbytes for info in self.infos)
        return {
            "copy": f"{self.module} is an equal copy of the embedding, to which config.json ties it: "
            f"quantkit leaves it out ({nbytes / 1e6:,.1f} MB)",
            "unlike": f"config.json ties {self.module} to the embedding, but they differ: both are used; "
            "tie_word_embeddings should be false",
        }.get(self.kind, "")

    def settle(self, infos: Infos, embedding: str = "model.embed_tokens") -> dict[str, TensorInfo]:
        """Return a checkpoint's tensors, in which a tied matrix is stored once, under the embedding's name.
        embedding: this name, if the files do not have it."""
        removed = {info.name for info in self.infos} if self.tied else set()
        settled = {name: info for name, info in infos.items() if name not in removed}
        if self.kind == "alone":
            renamed = ((embedding + info.name.removeprefix(self.module), info) for info in self.infos)
            settled |= {name: replace(info, name=name) for name, info in renamed}
        return settled


def decide(infos: Infos, ties: Callable[[], bool], stored: bool = True) -> Head:
    """Return what the head is. ties: returns whether the configuration ties it to the embedding. stored: the
    files are on this disk; otherwise tensors of the same type and shape count as equal.

    With several heads or embeddings, as in speech models, each stored one counts as a matrix of its own.
    """
    heads = _modules(infos, HEADS)
    if not heads:
        return Head("tied")
    module, parts = next(iter(heads.items()))
    kind, tied = "own", len(heads) == 1 and ties()
    if tied:
        embeddings = list((_modules(infos, EMBEDDINGS) or _of_shape(infos, parts)).values())
        if not embeddings:
            kind = "alone"
        elif len(embeddings) == 1:
            kind = "copy" if _equal(parts, embeddings[0], stored) else "unlike"
    return Head(kind, module, tuple(parts.values()))


def _modules(infos: Infos, modules: str) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors of weights outside the blocks: {module: {suffix: tensor}}."""
    pattern, tensors = re.compile(rf"({modules})\.(?!bias$)(.+)"), {}
    for name, info in infos.items():
        if not IN_BLOCK.search(name) and (match := pattern.fullmatch(name)):
            tensors.setdefault(match[1], {})[match[2]] = info
    return tensors


def _of_shape(infos: Infos, head: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Return other matrices outside the blocks with the head's shape: embeddings of other names."""
    shapes = {info.shape for info in head.values() if len(info.shape) == 2}
    others = [info for info in infos.values() if info.shape in shapes and not IN_BLOCK.search(info.name)]
    names = {info.name for info in head.values()}
    return {info.name: {"weight": info} for info in others if info.name not in names}


def _equal(head: Mapping[str, TensorInfo], embedding: Mapping[str, TensorInfo], stored: bool) -> bool:
    """Return whether two weights have the same tensors, byte for byte if they are on this disk."""
    forms = [{name: (info.dtype, info.shape) for name, info in side.items()} for side in (head, embedding)]
    if forms[0] != forms[1] or not stored:
        return forms[0] == forms[1]
    return all(a == b for name in head for a, b in zip(raw(head[name]), raw(embedding[name]), strict=True))
