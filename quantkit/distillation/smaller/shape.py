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
WIDTH_WORDS = ("intermediate_size", "ffn", "inner")  # in what families call the width of their MLPs
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
    name, width = find_width(skeleton, checkpoint)
    wanted = Shape(kept, options.channels(width), width, name)
    axes = laid_beside(skeleton, checkpoint, wanted)
    return wanted, axes, reader(axes, skeleton.blocks[0], checkpoint.source)


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
    """Entries of a configuration that are lists with one item for each block, such as `layer_types`.

    transformers is asked: without them and with a block more, it makes such a list longer. One that it makes
    for nobody is told by its name; one that stays as long is of something else.
    """
    depth, resolved = getattr(config, DEPTH), config.to_dict()
    lists = [
        key for key, value in resolved.items() if isinstance(value, (list, tuple)) and len(value) == depth
    ]
    if not lists:
        return []
    others = {key: value for key, value in resolved.items() if key not in lists}
    try:
        deeper = (
            type(config).from_dict(others | {config.attribute_map.get(DEPTH, DEPTH): depth + 1}).to_dict()
        )
    except Exception:  # validators of configurations raise kinds of their own; then names must do
        deeper = {}

    def is_by_layer(key: str) -> bool:
        made = deeper.get(key)
        return len(made) == depth + 1 if isinstance(made, (list, tuple)) else "layer" in key

    return [key for key in lists if is_by_layer(key)]


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
        several = isinstance(resolved.get(shape.name), (list, tuple))
        found[shape.name] = [shape.channels] * len(shape.kept) if several else shape.channels
    return found


def laid_beside(skeleton: Skeleton, checkpoint: Checkpoint, shape: Shape) -> dict[str, Axis]:
    """Parameters of a block that the width goes into, by name inside the block.

    Raises QuantkitError where the changed configuration makes another model than the teacher without some of
    its blocks and channels.
    """
    model, names, axes, wanted = _built(checkpoint, shape), skeleton.names, {}, {}
    built = _shapes(model)
    for name, found in names.shapes.items():
        if not name.startswith(f"{names.blocks}."):
            wanted[name] = found
    for k, index in enumerate(shape.kept):
        for local, _ in skeleton.blocks[index].named_parameters():
            wanted[names.of_block(k, local)] = names.shapes[names.of_block(index, local)]
    if odd := sorted(wanted.keys() ^ built.keys()):
        raise _other(checkpoint, f"it has no, or other, {name_all(odd, 4)}")
    for name, before in wanted.items():
        if built[name] == before:
            continue
        local = name.removeprefix(f"{names.blocks}.").partition(".")[2]
        axis = _axis(before, built[name], shape) if name.startswith(f"{names.blocks}.") else None
        if axis is None or axes.setdefault(local, axis) != axis:
            raise _other(checkpoint, f"{name} is {built[name]} instead of {before}")
    for k, (index, block) in enumerate(zip(shape.kept, model.get_submodule(names.blocks), strict=True)):
        made = _settings(block)
        for name, before in _settings(skeleton.blocks[index]).items():
            after = made.get(name)
            if after != before and not _follows(before, after, index, k, shape, len(skeleton.blocks)):
                raise _other(checkpoint, f"block {index}: {name} is {after} instead of {before}")
    return axes


def _settings(block: nn.Module) -> dict[str, bool | int | float | str | None]:
    """What modules of a block were told, such as a window: on few tokens some of it does not show."""
    return {
        f"{name}.{key}": value
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if key != "training" and not key.startswith("_")
        if value is None or isinstance(value, (bool, int, float, str))
    }


def _follows(before: object, after: object, index: int, k: int, shape: Shape, depth: int) -> bool:
    """Whether a number is that of a block, of all blocks, or of channels, so that it is to change."""
    if type(before) is not int or type(after) is not int:
        return False
    numbered = before - index == after - k or (before, after) == (depth, len(shape.kept))
    return numbered or (shape.channels is not None and before * shape.channels == after * shape.width)


def _axis(before: Sequence[int], after: Sequence[int], shape: Shape) -> Axis | None:
    """Along which axis, and how often, a parameter became as narrow as the student's MLPs."""
    found = [axis for axis, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
    if shape.channels is None or len(before) != len(after) or len(found) != 1:
        return None
    copies, rest = divmod(before[found[0]], shape.width)
    fits = not rest and after[found[0]] == copies * shape.channels
    return Axis(found[0], copies) if fits else None


def find_width(skeleton: Skeleton, checkpoint: Checkpoint) -> tuple[str, int]:
    """The configuration's entry for the width of the MLPs, and the width: the entry is tried that makes one
    linear of every block read fewer channels.

    Raises QuantkitError where there is none, or where blocks are mixtures of experts.
    """
    if skeleton.is_mixture:
        raise QuantkitError(
            f"{checkpoint.source} is a mixture of experts: its MLPs have no one width",
            hint="cut its blocks: --blocks",
            exit_code=UNSUPPORTED,
        )
    kept, linears = tuple(range(len(skeleton.blocks))), _linears(skeleton.blocks[0])
    for name in checkpoint.text_config.to_dict():
        if not any(word in name for word in WIDTH_WORDS) or "moe" in name:
            continue
        try:
            built = _shapes(_built(checkpoint, Shape(kept, PROBE, 0, name)))
        except QuantkitError:
            continue  # no number goes there: it is another entry
        widths = {
            linear.in_features
            for local, linear in linears.items()
            if built.get(skeleton.names.of_block(0, f"{local}.weight"), [0, 0])[1]
            == PROBE
            != linear.in_features
        }
        if len(widths) == 1:
            return name, widths.pop()
    raise QuantkitError(
        f"{checkpoint.source}: no entry of its configuration says how wide its MLPs are",
        hint="cut its blocks: --blocks",
        exit_code=UNSUPPORTED,
    )


def reader(axes: Mapping[str, Axis], block: nn.Module, source: str) -> str:
    """The linear that reads the channels (down). Raises QuantkitError unless it is one, reading each once."""
    found = [
        local.removesuffix(".weight")
        for local, axis in axes.items()
        if axis == Axis(1, 1) and local.removesuffix(".weight") in _linears(block)
    ]
    others = [
        local for local, axis in axes.items() if axis.axis != 0 and local.removesuffix(".weight") not in found
    ]
    if len(found) != 1 or others:
        raise QuantkitError(
            f"{source}: its MLPs are read by {name_all(found + others) or 'no linear'}",
            hint="cut its blocks: --blocks",
            exit_code=UNSUPPORTED,
        )
    return found[0]


def _linears(block: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}


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
