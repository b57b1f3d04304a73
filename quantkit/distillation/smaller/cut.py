"""Writes the student, before training, as a checkpoint folder: the teacher without some blocks.

transformers checks the student's configuration, so this file knows no architecture. It builds the student
from the changed configuration on the meta device and compares shapes: those of each student block with those
of the teacher's block that it copies. If parameters differ, the error names them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch import Tensor

from quantkit import __version__
from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, first_line, name_all
from quantkit.evaluation.comparison.table import markdown
from quantkit.grids.distance import relative_distance
from quantkit.models.files import checksums, hub, safetensors_folder
from quantkit.models.files.checkpoint import MANIFEST, Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.models.files.safetensors_folder import CONFIG, TensorInfo
from quantkit.models.skeleton import Skeleton, experts, meta_model
from quantkit.quantize.calibrate import walk
from quantkit.quantize.outputs.finish import VERIFY_TOLERANCE

DEPTH = "num_hidden_layers"
NOT_TRAINED = "Not trained: on held-out text training did not bring it closer to the teacher."
CHECKED = 8  # tokens whose logits are compared


def write(
    skeleton: Skeleton, checkpoint: Checkpoint, kept: Sequence[int], place: Path, shard_bytes: int
) -> None:
    """Write the student with the blocks `kept` into the folder `place`. Tensors keep their bytes."""
    sources: dict[str, TensorInfo] = {}
    infos = []
    for info, name in renamed(skeleton, checkpoint, kept):
        sources[name] = info
        infos.append(replace(checkpoint.plain(info), name=name))
    place.mkdir()
    safetensors_folder.write_folder(
        place, infos, shard_bytes, lambda info: checkpoint.data(sources[info.name])
    )
    checkpoint.write_companions(place)
    config = checkpoint.raw_config | changes(checkpoint, kept)
    (place / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def rewrite(student: Checkpoint, state: Mapping[str, Tensor], place: Path, shard_bytes: int) -> None:
    """Write the student into the folder `place`. state: new values, by stored name; other tensors stay."""

    def data(info: TensorInfo) -> Iterator[bytes | memoryview]:
        return iter([_bytes(state[info.name])]) if info.name in state else student.data(info)

    place.mkdir()
    safetensors_folder.write_folder(place, student.infos.values(), shard_bytes, data)
    student.write_companions(place)
    shutil.copyfile(student.folder / CONFIG, place / CONFIG)


def renamed(
    skeleton: Skeleton, checkpoint: Checkpoint, kept: Sequence[int]
) -> Iterator[tuple[TensorInfo, str]]:
    """Yield (the teacher's stored tensor, its name in the student), with blocks renumbered.

    Blocks beyond the model's depth, which predict further tokens, are left out.
    """
    prefixes = skeleton.names.stored_blocks
    container = re.compile(re.escape(prefixes[0].removesuffix("0.")) + r"(\d+)\.")
    numbers = {index: k for k, index in enumerate(kept)}
    for name, info in checkpoint.infos.items():
        match = container.match(name)
        if match is None:
            yield info, name
        elif int(match[1]) in numbers:
            yield info, prefixes[numbers[int(match[1])]] + name[match.end() :]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def prove(teacher: Skeleton, place: Path, ids: Tensor, expected: Tensor, source: str) -> None:
    """Check that the written student computes what the teacher computes without the other blocks.

    ids: `[batch, tokens]`. expected: the teacher's final hidden states without the other blocks. Raises
    QuantkitError if the results differ, for example because a block's result depends on its number.
    """
    student = open_checkpoint(str(place), trust_remote_code=teacher.checkpoint.trust_remote_code)
    skeleton = Skeleton(student, teacher.dtype, teacher.device)
    skeleton.names.check_complete()
    skeleton.load_rest()
    (hidden,) = walk.through(skeleton, [ids])
    last = slice(-CHECKED, None)
    pairs = (hidden, expected), (skeleton.logits(hidden[0, last]), teacher.logits(expected[0, last]))
    tolerance = VERIFY_TOLERANCE[str(teacher.dtype).removeprefix("torch.")]
    for found, needed in pairs:
        difference = relative_distance(found, needed)
        if not difference <= tolerance:
            raise QuantkitError(
                f"{source} cannot be cut: the smaller model differs by {difference:.2g} from the teacher "
                "without these blocks",
                hint="the result of its blocks depends on their number or their neighbours",
                exit_code=UNSUPPORTED,
            )


def describe(teacher: Checkpoint, place: Path, record: dict, fingerprint: dict) -> None:
    """Write the manifest quantkit.json and the model card README.md; they contain no times or paths."""
    manifest = {
        "schema": "quantkit.manifest/1",
        "quantkit": __version__,
        "source": {"name": Path(teacher.source).name, "sha256": fingerprint["source_sha256"]},
        "method": "distill",
        "job": fingerprint,
        "linears": [],
        "files": checksums.of_folder(place, ()),
        "distillation": {key: record[key] for key in ("chosen", "trained", "published", "held_out")},
    }
    (place / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
    (place / "README.md").write_text(card(teacher, record))


def card(teacher: Checkpoint, record: dict) -> str:
    """Return the text of the model card: kept blocks, training text and divergences."""
    local = Path(teacher.source).exists() or not hub.is_id(teacher.source)
    source = Path(teacher.source).name if local else teacher.source
    big, small = record["teacher"], record["student"]
    name, trained = Path(small["output"]).name, record["published"] == "trained"
    blocks = ", ".join(map(str, record["chosen"]["blocks"]))
    table = markdown(record["held_out"]).partition("\n")[2].strip()  # without the heading of quantkit eval
    steps, text = record["trained"]["best"]["step"], record["calibration"]["source"]
    return f"""---
base_model: {source}
library_name: transformers
tags:
- distillation
- quantkit
---

# {name}

A student of {source} with {small["parameters"]:,} of its {big["parameters"]:,} parameters, made by quantkit
{__version__}.

Blocks: {blocks} of {big["blocks"]}, those whose absence changes the predictions most.
{f"Trained for {steps} steps on the teacher's predictions for {text} text." if trained else NOT_TRAINED}

{table}

`quantkit.json` holds every option, the importance of each block, and the hashes of teacher and text.
Measure it yourself: `quantkit eval {source} {name} --text TEXT`.
"""


def check_teacher(checkpoint: Checkpoint, skeleton: Skeleton, blocks: int) -> None:
    """Raise QuantkitError, with the reason, if the teacher cannot be cut to `blocks` blocks."""
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
    """Return the student's number of parameters; tied ones count once."""
    inside = [sum(part.numel() for part in block.parameters()) for block in skeleton.blocks]
    return skeleton.parameters - sum(inside) + sum(inside[index] for index in kept)


def per_layer(config: transformers.PretrainedConfig) -> list[str]:
    """Return the names of a configuration's lists with one item per block, such as `layer_types`."""
    depth, resolved = getattr(config, DEPTH), config.to_dict()
    return [
        key
        for key, value in resolved.items()
        if isinstance(value, (list, tuple)) and len(value) == depth and "layer" in key
    ]


def changes(checkpoint: Checkpoint, kept: Sequence[int]) -> dict:
    """Return the entries of config.json that change: the depth and lists with one item per block."""
    config = checkpoint.text_config
    resolved = config.to_dict()
    lists = {key: [resolved[key][index] for index in kept] for key in per_layer(config)}
    return {config.attribute_map.get(DEPTH, DEPTH): len(kept)} | lists


def check_shapes(skeleton: Skeleton, checkpoint: Checkpoint, kept: Sequence[int]) -> None:
    """Raise QuantkitError if the changed configuration builds other parameters than the teacher has without
    the blocks left out."""
    names, inside = skeleton.names, f"{skeleton.names.blocks}."
    needed = {name: found for name, found in names.shapes.items() if not name.startswith(inside)}
    for k, index in enumerate(kept):
        for local, _ in skeleton.blocks[index].named_parameters():
            needed[names.of_block(k, local)] = names.shapes[names.of_block(index, local)]
    try:
        config = type(checkpoint.config).from_dict(checkpoint.config.to_dict() | changes(checkpoint, kept))
        model = meta_model.empty(config, checkpoint.source, None, checkpoint.trust_remote_code)
        experts.take_apart(model)
        meta_model.replace_conv1d(model)
        built = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        odd = sorted(name for name in needed | built if needed.get(name) != built.get(name))
        why = f"it has no, or other, {name_all(odd, 4)}" if odd else ""
    except Exception as error:  # validators raise many kinds of errors
        why = first_line(error)
    if why:
        raise QuantkitError(
            f"{checkpoint.source} cannot be cut so: its configuration then makes another model ({why})",
            hint="config.json has no list of its blocks' types that can be cut; another number of --blocks "
            "may work",
            exit_code=UNSUPPORTED,
        )
