"""Rotation of the residual stream outside the blocks: embeddings, final norm, head."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.transforms.rotation.edits import EQUAL, Edit, Turn, difference, of_norm
from quantkit.quantize.transforms.rotation.orthogonal import Orthogonal
from quantkit.quantize.transforms.rotation.stream import NotRotatable, refuse_layer_norm


def find(skeleton: Skeleton, by: Orthogonal) -> tuple[Checkpoint, dict[str, tuple[str, str, Edit]]]:
    """Return the checkpoint and the edits outside the blocks: stored name -> (name in the model, stored
    source, edit). A tied head that absorbs a norm's weight becomes a tensor of its own.

    Raises NotRotatable if other parts outside the blocks read the stream.
    """
    model, checkpoint, names = skeleton.model, skeleton.checkpoint, skeleton.names.stored
    _check(skeleton, by.width)
    edits = _final(skeleton, by)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.embedding_dim == by.width:
            edits[f"{name}.weight"] = Edit([Turn(-1, by)])
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    source = names[_name(model, embedding)]
    if head.weight is embedding.weight:
        name = _name(model, head)
        if edits[name].gain is None:  # nothing goes into the head: it turns as the embedding does
            del edits[name]
        else:
            stored, config = names.get(name, name), copy.deepcopy(checkpoint.config)
            config.tie_word_embeddings = False
            infos = {stored: replace(checkpoint.infos[source], name=stored)} | checkpoint.infos
            raw = checkpoint.raw_config | {"tie_word_embeddings": False}
            checkpoint = replace(checkpoint, infos=infos, config=config, raw_config=raw)
    found = {names.get(name, name): (name, names.get(name, source), edit) for name, edit in edits.items()}
    return checkpoint, found


def _norms(model: nn.Module, width: int) -> dict[str, nn.Module]:
    """Return the norms outside the blocks, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.shape == (width,)
    }


def _check(skeleton: Skeleton, width: int) -> None:
    """Raise NotRotatable if the parts outside the blocks show that the stream cannot be rotated."""
    model, names, infos = skeleton.model, skeleton.names, skeleton.checkpoint.infos
    head = model.get_output_embeddings()
    known = {*names.stored.values(), *(part for parts in names.joined.values() for part in parts)}
    matrices = (name for name, info in infos.items() if len(info.shape) > 1 and width in info.shape)
    if names.language:
        raise NotRotatable("other modalities write into the hidden states, too")
    if unknown := next((name for name in matrices if name not in known), None):
        raise NotRotatable(f"{unknown} is no part of the model, but may read its hidden states")
    if not isinstance(head, nn.Linear) or head.in_features != width:
        raise NotRotatable("there is no head that reads the hidden states")
    if len(norms := _norms(model, width)) > 1:
        raise NotRotatable(f"there are several norms outside the blocks: {', '.join(norms)}")


def _final(skeleton: Skeleton, by: Orthogonal) -> dict[str, Edit]:
    """Return the edits of the final norm (its weight may be absent) and of the head. Raises NotRotatable if
    rotated hidden states then give other logits."""
    model = skeleton.model
    parameters = dict(model.named_parameters(remove_duplicate=False))
    hidden = torch.randn(4, by.width, generator=torch.Generator().manual_seed(0)).to(skeleton.device)
    expected, norms = skeleton.logits(hidden), _norms(model, by.width)
    for module in norms.values():
        refuse_layer_norm(module, by.width)
    for one_plus in (False, True):
        head, found = Edit([Turn(-1, by)]), {}
        for name in norms:
            of_norm(found, name, one_plus)
            head.gain = name, one_plus
        found[_name(model, model.get_output_embeddings())] = head
        values = {name: edit.of(parameters[name], parameters.__getitem__) for name, edit in found.items()}
        with torch.no_grad():
            logits = skeleton.logits(by.turn(hidden), values)
        if difference(logits, expected) <= EQUAL:
            return found
    raise NotRotatable("what follows the blocks is not a norm and a head")


def _name(model: nn.Module, part: nn.Module) -> str:
    """Return the name of a module's weight."""
    return next(f"{name}.weight" for name, module in model.named_modules() if module is part)
