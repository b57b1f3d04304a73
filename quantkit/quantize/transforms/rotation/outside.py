"""What lies outside the blocks when the residual stream turns: embeddings, final norm, head."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from quantkit.models.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.transforms.rotation import proof, stream
from quantkit.quantize.transforms.rotation.edits import Edit, Turn, of_norm
from quantkit.quantize.transforms.rotation.orthogonal import Orthogonal
from quantkit.quantize.transforms.rotation.stream import Norm


def norms(model: nn.Module, width: int) -> dict[str, nn.Module]:
    """Norms outside the blocks, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.shape == (width,)
    }


def refused(skeleton: Skeleton, by: Orthogonal) -> str:
    """Why what lies outside the blocks does not turn; "" where it does."""
    model, names, width = skeleton.model, skeleton.names, by.width
    head = model.get_output_embeddings()
    known = {*names.stored.values(), *(part for parts in names.joined.values() for part in parts)}
    unknown = [
        name
        for name in skeleton.checkpoint.names
        if name not in known
        and len(skeleton.checkpoint.infos[name].shape) > 1
        and width in skeleton.checkpoint.infos[name].shape
    ]
    if names.language:
        return "other modalities write into the hidden states, too"
    if unknown:
        return f"{unknown[0]} is no part of the model, but may read its hidden states"
    if not isinstance(head, nn.Linear) or head.in_features != width:
        return "there is no head that reads the hidden states"
    if len(norms(model, width)) > 1:
        return f"there are several norms outside the blocks: {', '.join(norms(model, width))}"
    if _final_norm(skeleton, by) is None:
        return "what follows the blocks is not a norm and a head"
    return ""


def _final_norm(skeleton: Skeleton, by: Orthogonal) -> dict[str, Norm] | None:
    """The norm behind the blocks, by name, empty where it has no weight; None if logits do not turn."""
    found = norms(skeleton.model, by.width)
    hidden = torch.randn(4, by.width, generator=torch.Generator().manual_seed(0)).to(skeleton.device)
    wanted = skeleton.logits(hidden)
    for one_plus in (False, True):
        one = {
            name: Norm(one_plus, stream.subtracts_mean(module, by.width)) for name, module in found.items()
        }
        edits, parameters = (
            _head(skeleton, one, by),
            dict(skeleton.model.named_parameters(remove_duplicate=False)),
        )
        values = {name: edit.of(parameters[name], parameters.__getitem__) for name, edit in edits.items()}
        with torch.no_grad():
            logits = skeleton.trace_logits(by.turn(hidden), values)
        if proof.difference(logits, wanted) <= proof.EXACT:
            return one
    return None


def _head(skeleton: Skeleton, final: dict[str, Norm], by: Orthogonal) -> dict[str, Edit]:
    """The final norm and the head."""
    model = skeleton.model
    found: dict[str, Edit] = {}
    edit = Edit([Turn(-1, by)])
    for name, norm in final.items():
        found |= of_norm(name, norm, getattr(model.get_submodule(name), "bias", None) is not None, by)
        edit.gain = name, norm, -1
    return found | {_name_of_head(model): edit}


def _name_of_head(model: nn.Module) -> str:
    head = model.get_output_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def edits_of(skeleton: Skeleton, by: Orthogonal) -> tuple[dict[str, Edit], Checkpoint]:
    """Of all parameters outside the blocks that turn, by their names in the model, and the checkpoint with a
    head of its own where a norm's weight goes into it."""
    model, checkpoint = skeleton.model, skeleton.checkpoint
    found = _head(skeleton, _final_norm(skeleton, by), by)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.embedding_dim == by.width:
            found[f"{name}.weight"] = Edit([Turn(-1, by)])
    head = _name_of_head(model)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if not tied:
        return found, checkpoint
    if found[head].gain is None:  # nothing goes into the head: it turns as the embedding does
        del found[head]
        return found, checkpoint
    name, source = stored(skeleton, head)
    config = copy.deepcopy(checkpoint.config)
    config.tie_word_embeddings = False
    infos = dict(checkpoint.infos)
    infos.setdefault(name, replace(infos[source], name=name))
    raw = checkpoint.raw_config | {"tie_word_embeddings": False}
    return found, replace(checkpoint, infos=infos, config=config, raw_config=raw)


def stored(skeleton: Skeleton, name: str) -> tuple[str, str]:
    """Where a parameter of the model is stored, and what it is made of: for a tied head that is stored
    nowhere the embedding."""
    names = skeleton.names.stored
    if name in names:
        return names[name], names[name]
    embedding = skeleton.model.get_input_embeddings()
    source = next(f"{n}.weight" for n, module in skeleton.model.named_modules() if module is embedding)
    return name, names[source]
