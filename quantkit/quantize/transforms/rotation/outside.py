"""What lies outside the blocks when the residual stream turns: embeddings, final norm, head."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.transforms.rotation import stream
from quantkit.quantize.transforms.rotation.edits import EXACT, Edit, Turn, difference, of_norm
from quantkit.quantize.transforms.rotation.orthogonal import Orthogonal
from quantkit.quantize.transforms.rotation.stream import Norm, Untouchable


@dataclass(frozen=True)
class Outside:
    """edits: by the names in the model. checkpoint: with a head of its own where one was tied that takes a
    norm's weight. names: stored, by the names in the model; head: the name of one that was made."""

    edits: Mapping[str, Edit]
    checkpoint: Checkpoint
    names: Mapping[str, str]
    embedding: str

    def stored(self, name: str) -> tuple[str, str]:
        """Where a parameter is to be stored, and what it is made of: a tied head of the embedding."""
        return self.names.get(name, name), self.names.get(name, self.names[self.embedding])


def find(skeleton: Skeleton, by: Orthogonal) -> Outside:
    """What turns, of a model whose rest is loaded. Raises Untouchable where that is not all that has to."""
    model, checkpoint = skeleton.model, skeleton.checkpoint
    _check(skeleton, by.width)
    edits = _final(skeleton, by)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.embedding_dim == by.width:
            edits[f"{name}.weight"] = Edit([Turn(-1, by)])
    head, embedding = _name(model, model.get_output_embeddings()), _name(model, model.get_input_embeddings())
    found = Outside(edits, checkpoint, skeleton.names.stored, embedding)
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        return found
    if edits[head].gain is None:  # nothing goes into the head: it turns as the embedding does
        return replace(found, edits={name: edit for name, edit in edits.items() if name != head})
    stored, source = found.stored(head)
    config = copy.deepcopy(checkpoint.config)
    config.tie_word_embeddings = False
    infos = {stored: replace(checkpoint.infos[source], name=stored)} | checkpoint.infos
    raw = checkpoint.raw_config | {"tie_word_embeddings": False}
    return replace(found, checkpoint=replace(checkpoint, infos=infos, config=config, raw_config=raw))


def subtracts_mean(model: nn.Module, width: int) -> bool:
    """Whether a norm outside the blocks does."""
    return any(stream.subtracts_mean(module, width) for module in _norms(model, width).values())


def _norms(model: nn.Module, width: int) -> dict[str, nn.Module]:
    """Norms outside the blocks, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.shape == (width,)
    }


def _check(skeleton: Skeleton, width: int) -> None:
    """Raise Untouchable for what is seen at once."""
    model, names, infos = skeleton.model, skeleton.names, skeleton.checkpoint.infos
    head = model.get_output_embeddings()
    known = {*names.stored.values(), *(part for parts in names.joined.values() for part in parts)}
    matrices = (name for name, info in infos.items() if len(info.shape) > 1 and width in info.shape)
    if names.language:
        raise Untouchable("other modalities write into the hidden states, too")
    if unknown := next((name for name in matrices if name not in known), None):
        raise Untouchable(f"{unknown} is no part of the model, but may read its hidden states")
    if not isinstance(head, nn.Linear) or head.in_features != width:
        raise Untouchable("there is no head that reads the hidden states")
    if len(norms := _norms(model, width)) > 1:
        raise Untouchable(f"there are several norms outside the blocks: {', '.join(norms)}")


def _final(skeleton: Skeleton, by: Orthogonal) -> dict[str, Edit]:
    """Of the norm behind the blocks, which may have no weight, and the head: with them, turned hidden states
    have the same logits. Raises Untouchable where they have not."""
    model = skeleton.model
    parameters = dict(model.named_parameters(remove_duplicate=False))
    hidden = torch.randn(4, by.width, generator=torch.Generator().manual_seed(0)).to(skeleton.device)
    wanted = skeleton.logits(hidden)
    for one_plus in (False, True):
        head, found = Edit([Turn(-1, by)]), {}
        for name, module in _norms(model, by.width).items():
            norm = Norm(one_plus, stream.subtracts_mean(module, by.width))
            found |= of_norm(name, norm, f"{name}.bias" in parameters, by)
            head.gain = name, norm, -1
        found[_name(model, model.get_output_embeddings())] = head
        values = {name: edit.of(parameters[name], parameters.__getitem__) for name, edit in found.items()}
        with torch.no_grad():
            logits = skeleton.logits(by.turn(hidden), values)
        if difference(logits, wanted) <= EXACT:
            return found
    raise Untouchable("what follows the blocks is not a norm and a head")


def _name(model: nn.Module, part: nn.Module) -> str:
    """Of a module's weight."""
    return next(f"{name}.weight" for name, module in model.named_modules() if module is part)
