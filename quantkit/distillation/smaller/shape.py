"""The student's configuration, checked by transformers: nothing is known here of any architecture.

The student's model is built from the changed configuration, shapes alone, and compared with the teacher's:
block k of the student with the block of the teacher that it was. Parameters that differ are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import transformers

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, first_line, name_all
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton, experts, meta_model

DEPTH = "num_hidden_layers"


def check_teacher(checkpoint: Checkpoint, skeleton: Skeleton, blocks: int) -> None:
    """Raise QuantkitError for a teacher that cannot be cut to so many blocks, with the reason."""
    depth = len(skeleton.blocks)
    if checkpoint.quantized or "quantization_config" in checkpoint.raw_config:
        why, hint = "it is quantized", "distil the original checkpoint, then compress the student"
    elif checkpoint.text_config is not checkpoint.config or skeleton.towers:
        why = "its language model is part of a multimodal model, whose code also counts the blocks"
        hint = "distil a model of text alone"
    elif getattr(checkpoint.text_config, DEPTH, None) != depth:
        why = f"{DEPTH} in its configuration is not {depth}, its number of blocks"
        hint = "quantkit cuts models whose depth is one number"
    elif skeleton.names.joined or len(skeleton.names.stored) > len(set(skeleton.names.stored.values())):
        why = "its checkpoint stores parameters in pieces that transformers joins"
        hint = "save it once with transformers' save_pretrained and give that folder"
    elif skeleton.checkpoint is not checkpoint and skeleton.checkpoint.infos != checkpoint.infos:
        why = "the experts of a layer are stored in one tensor"
        hint = "quantkit trains experts that are stored one by one"
    elif blocks >= depth:
        raise QuantkitError(f"--blocks {blocks}: the teacher has {depth}", f"choose 1 to {depth - 1}", USAGE)
    else:
        return check_shapes(skeleton, checkpoint, range(blocks))
    raise QuantkitError(f"{checkpoint.source} cannot be cut: {why}", hint, UNSUPPORTED)


def parameters(skeleton: Skeleton, kept: Sequence[int]) -> int:
    """Return how many parameters the student has; tied ones count once."""
    inside = [sum(part.numel() for part in block.parameters()) for block in skeleton.blocks]
    return skeleton.parameters - sum(inside) + sum(inside[index] for index in kept)


def per_layer(config: transformers.PretrainedConfig) -> list[str]:
    """Return entries of a configuration that list one item for each block, such as `layer_types`."""
    depth, resolved = getattr(config, DEPTH), config.to_dict()
    return [
        key
        for key, value in resolved.items()
        if isinstance(value, (list, tuple)) and len(value) == depth and "layer" in key
    ]


def changes(checkpoint: Checkpoint, kept: Sequence[int]) -> dict:
    """Return the entries of config.json that differ in the student: depth, and lists by layer."""
    config = checkpoint.text_config
    resolved = config.to_dict()
    lists = {key: [resolved[key][index] for index in kept] for key in per_layer(config)}
    return {config.attribute_map.get(DEPTH, DEPTH): len(kept)} | lists


def check_shapes(skeleton: Skeleton, checkpoint: Checkpoint, kept: Sequence[int]) -> None:
    """Raise QuantkitError where the changed configuration makes another model than the teacher without some
    of its blocks."""
    names, inside = skeleton.names, f"{skeleton.names.blocks}."
    wanted = {name: found for name, found in names.shapes.items() if not name.startswith(inside)}
    for k, index in enumerate(kept):
        for local, _ in skeleton.blocks[index].named_parameters():
            wanted[names.of_block(k, local)] = names.shapes[names.of_block(index, local)]
    try:
        config = type(checkpoint.config).from_dict(checkpoint.config.to_dict() | changes(checkpoint, kept))
        model = meta_model.empty(config, checkpoint.source, None, checkpoint.trust_remote_code)
        experts.take_apart(model)
        meta_model.replace_conv1d(model)
        built = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        odd = sorted(name for name in wanted | built if wanted.get(name) != built.get(name))
        why = f"it has no, or other, {name_all(odd, 4)}" if odd else ""
    except Exception as error:  # validators of configurations raise kinds of their own
        why = first_line(error)
    if why:
        raise QuantkitError(
            f"{checkpoint.source} cannot be cut so: its configuration then makes another model ({why})",
            hint="config.json has no list of its blocks' types that can be cut; another number of --blocks "
            "may work",
            exit_code=UNSUPPORTED,
        )
