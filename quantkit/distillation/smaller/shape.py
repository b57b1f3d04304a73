"""The student's configuration, and which of its parameters is which of the teacher's: asked of transformers.

Nothing is known here of any architecture. The student's model is built from the changed configuration, shapes
alone, and laid beside the teacher's: block k of the student beside the block it was. A parameter of another
shape is one that the width went into, along the axis that changed. What does not fit is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import transformers
from torch import nn

from quantkit.distillation.options import SmallerOptions
from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, first_line, name_all
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton, experts, meta_model

DEPTH = "num_hidden_layers"
WIDTHS = ("intermediate_size", "n_inner", "ffn_dim")  # what families call the width of their MLPs
PROBE = 24  # channels of a student that is only laid beside its teacher


@dataclass(frozen=True)
class Axis:
    """Where a parameter is as wide as the MLP. copies: how many times, one below the other (gate and up)."""

    axis: int
    copies: int


@dataclass(frozen=True)
class Shape:
    """kept: the teacher's blocks that the student has, in order. channels: of the student's MLPs, None for
    the teacher's. width: the teacher's. name: of the configuration's entry for it."""

    kept: tuple[int, ...]
    channels: int | None = None
    width: int | None = None
    name: str | None = None


def check_teacher(checkpoint: Checkpoint, skeleton: Skeleton) -> None:
    """Raise QuantkitError for a teacher that cannot be cut, with the reason."""
    if checkpoint.quantized or "quantization_config" in checkpoint.raw_config:
        why, hint = "it is quantized", "distil the original checkpoint, then compress the student"
    elif checkpoint.text_config is not checkpoint.config or skeleton.towers:
        why = "other modalities are wrapped around its language model, whose blocks their code counts, too"
        hint = "distil a model of text alone"
    elif getattr(checkpoint.text_config, DEPTH, None) != len(skeleton.blocks):
        why = f"its configuration does not say in {DEPTH} that it has {len(skeleton.blocks)} blocks"
        hint = "quantkit cuts models whose depth is one number"
    elif skeleton.names.joined or len(skeleton.names.stored) > len(set(skeleton.names.stored.values())):
        why = "its checkpoint stores parameters in pieces that transformers joins"
        hint = "save it once with transformers' save_pretrained and give that folder"
    elif skeleton.checkpoint is not checkpoint and skeleton.checkpoint.infos != checkpoint.infos:
        why = "the experts of a layer are stored in one tensor"
        hint = "quantkit trains experts that are stored one by one"
    else:
        return
    raise QuantkitError(f"{checkpoint.source} cannot be cut: {why}", hint, UNSUPPORTED)


def resolve(
    options: SmallerOptions, checkpoint: Checkpoint, skeleton: Skeleton
) -> tuple[Shape, dict[str, Axis], str | None]:
    """The student's shape, tried with the first blocks, what its width means for a block (`laid_beside`), and
    the linear that reads the channels, None where all stay."""
    depth, blocks = len(skeleton.blocks), options.blocks
    if blocks is not None and blocks > depth:
        raise QuantkitError(f"--blocks {blocks}: the teacher has {depth}", f"choose 1 to {depth - 1}", USAGE)
    kept = tuple(range(depth if blocks is None else blocks))
    if options.width is None:
        if len(kept) == depth:
            hint = f"choose 1 to {depth - 1}, or make it narrower with --width"
            raise QuantkitError(f"--blocks {depth} keeps all of the teacher's", hint, USAGE)
        wanted = Shape(kept)
        return wanted, laid_beside(skeleton, checkpoint, wanted), None
    name, reader, width = find_width(skeleton, checkpoint)
    wanted = Shape(kept, options.channels(width), width, name)
    return wanted, laid_beside(skeleton, checkpoint, wanted), reader


def parameters(skeleton: Skeleton, wanted: Shape, axes: Mapping[str, Axis]) -> int:
    """How many the student has; tied ones count once."""
    inside = [sum(part.numel() for part in block.parameters()) for block in skeleton.blocks]
    count = skeleton.parameters - sum(inside) + sum(inside[index] for index in wanted.kept)
    for index in wanted.kept:
        for local, axis in axes.items():
            whole = skeleton.blocks[index].get_parameter(local)
            lost = axis.copies * (wanted.width - wanted.channels)
            count -= whole.numel() // whole.shape[axis.axis] * lost
    return count


def per_layer(config: transformers.PretrainedConfig) -> list[str]:
    """Return entries of a configuration that list one item for each block, such as `layer_types`."""
    depth, resolved = getattr(config, DEPTH), config.to_dict()
    return [
        key
        for key, value in resolved.items()
        if isinstance(value, (list, tuple)) and len(value) == depth and "layer" in key
    ]


def changed(checkpoint: Checkpoint, shape: Shape) -> dict:
    """config.json of the student: the teacher's with depth, lists by layer and width changed."""
    return checkpoint.raw_config | _changes(checkpoint, shape)


def _changes(checkpoint: Checkpoint, shape: Shape) -> dict:
    config = checkpoint.text_config
    resolved = config.to_dict()
    found = {config.attribute_map.get(DEPTH, DEPTH): len(shape.kept)}
    for key in per_layer(config):
        found[key] = [resolved[key][index] for index in shape.kept]
    if shape.channels is not None:
        found[shape.name] = shape.channels
    return found


def laid_beside(skeleton: Skeleton, checkpoint: Checkpoint, shape: Shape) -> dict[str, Axis]:
    """Parameters of a block that the width goes into, by name inside the block.

    Raises QuantkitError where the changed configuration makes another model than the teacher without some of
    its blocks and channels.
    """
    names, axes, built = skeleton.names, {}, _shapes(_built(checkpoint, shape))
    inside = f"{names.blocks}."
    wanted = {name: found for name, found in names.shapes.items() if not name.startswith(inside)}
    for k, index in enumerate(shape.kept):
        for local, _ in skeleton.blocks[index].named_parameters():
            wanted[names.of_block(k, local)] = names.shapes[names.of_block(index, local)]
    if odd := sorted(wanted.keys() ^ built.keys()):
        raise _other(checkpoint, f"it has no, or other, {name_all(odd, 4)}")
    for name, before in wanted.items():
        if built[name] == before:
            continue
        local = name.removeprefix(inside).partition(".")[2]
        axis = _axis(before, built[name], shape) if name.startswith(inside) else None
        if axis is None or axes.setdefault(local, axis) != axis:
            raise _other(checkpoint, f"{name} is {built[name]} instead of {before}")
    return axes


def _axis(before: Sequence[int], after: Sequence[int], shape: Shape) -> Axis | None:
    """Along which axis, and how often, a parameter became as narrow as the student's MLPs."""
    found = [axis for axis, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
    if shape.channels is None or len(before) != len(after) or len(found) != 1:
        return None
    copies, rest = divmod(before[found[0]], shape.width)
    fits = not rest and after[found[0]] == copies * shape.channels
    return Axis(found[0], copies) if fits else None


def find_width(skeleton: Skeleton, checkpoint: Checkpoint) -> tuple[str, str, int]:
    """Return the configuration's entry for the width of the MLPs, the linear that reads the channels (down),
    and the width: with another number in the entry, this linear alone reads as many channels.

    Raises QuantkitError where there is none, or where blocks are mixtures of experts.
    """
    if skeleton.is_mixture:
        raise QuantkitError(
            f"{checkpoint.source} is a mixture of experts: its MLPs have no one width",
            hint="cut its blocks: --blocks",
            exit_code=UNSUPPORTED,
        )
    name = next((name for name in WIDTHS if name in checkpoint.text_config.to_dict()), None)
    kept, read = tuple(range(len(skeleton.blocks))), []
    if name is not None:
        built = _shapes(_built(checkpoint, Shape(kept, PROBE, 0, name)))
        read = [
            (local, module.in_features)
            for local, module in skeleton.blocks[0].named_modules()
            if isinstance(module, nn.Linear)
            and built[skeleton.names.of_block(0, f"{local}.weight")][1] == PROBE != module.in_features
        ]
    if len(read) != 1:
        raise QuantkitError(
            f"{checkpoint.source}: no entry of its configuration says how wide its MLPs are",
            hint="cut its blocks: --blocks",
            exit_code=UNSUPPORTED,
        )
    return name, *read[0]


def _built(checkpoint: Checkpoint, shape: Shape) -> nn.Module:
    """The student as transformers builds it, shapes alone."""
    resolved = checkpoint.config.to_dict() | _changes(checkpoint, shape)
    try:
        config = type(checkpoint.config).from_dict(resolved)
        model = meta_model.empty(config, checkpoint.source, None, checkpoint.trust_remote_code)
    except Exception as error:  # validators of configurations raise kinds of their own
        raise _other(checkpoint, first_line(error)) from error
    experts.take_apart(model)
    meta_model.replace_conv1d(model)
    return model


def _shapes(model: nn.Module) -> dict[str, list[int]]:
    """Of all parameters, by name in the model."""
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def _other(checkpoint: Checkpoint, why: str) -> QuantkitError:
    return QuantkitError(
        f"{checkpoint.source} cannot be cut so: its configuration then makes another model ({why})",
        hint="its blocks are not told apart by lists in config.json that can be cut in step; another number "
        "of --blocks may do",
        exit_code=UNSUPPORTED,
    )
