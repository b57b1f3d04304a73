"""The student as cut from its teacher: a checkpoint folder under the hub's names, written tensor by
tensor."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quantkit.distillation.smaller.channels import Narrowed
from quantkit.distillation.smaller.shape import Axis, Shape, changed
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.distance import relative_distance
from quantkit.models.files import safetensors_folder
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.models.files.safetensors_folder import CONFIG, DTYPE_BYTES, TensorInfo
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import walk
from quantkit.quantize.outputs.finish import VERIFY_TOLERANCE

CHECKED = 8  # tokens whose logits are compared


def write(
    skeleton: Skeleton,
    checkpoint: Checkpoint,
    shape: Shape,
    axes: Mapping[str, Axis],
    narrowed: Mapping[int, Narrowed],
    place: Path,
    shard_bytes: int,
) -> None:
    """The student's folder at `place`. Tensors that are not cut keep their bytes; one is in memory at a
    time."""
    cuts = {
        skeleton.names.stored_of(index, local): (_along(skeleton, index, local, axis), axis, narrowed[index])
        for index in narrowed
        for local, axis in axes.items()
    }
    sources: dict[str, TensorInfo] = {}
    infos = []
    for info, name in renamed(skeleton, checkpoint, shape):
        sources[name] = info
        info = checkpoint.plain(info)
        sizes = list(info.shape)
        if info.name in cuts:
            along, axis, kept = cuts[info.name]
            sizes[along] = axis.copies * len(kept.channels)
        nbytes = DTYPE_BYTES[info.dtype] * torch.Size(sizes).numel()
        infos.append(TensorInfo(name, info.dtype, tuple(sizes), info.file, info.offset, nbytes))

    def data(info: TensorInfo) -> Iterator[bytes | memoryview]:
        source = sources[info.name]
        if source.name not in cuts:
            return checkpoint.data(source)
        return iter([_bytes(_cut(checkpoint, source, *cuts[source.name]))])

    place.mkdir()
    safetensors_folder.write_folder(place, infos, shard_bytes, data)
    checkpoint.write_companions(place)
    (place / CONFIG).write_text(json.dumps(changed(checkpoint, shape), indent=2, ensure_ascii=False) + "\n")


def rewrite(student: Checkpoint, state: Mapping[str, Tensor], place: Path, shard_bytes: int) -> None:
    """The student's folder at `place`, with other values for the tensors of `state`, by their stored
    names."""

    def data(info: TensorInfo) -> Iterator[bytes | memoryview]:
        return iter([_bytes(state[info.name])]) if info.name in state else student.data(info)

    place.mkdir()
    safetensors_folder.write_folder(place, student.infos.values(), shard_bytes, data)
    student.write_companions(place)
    shutil.copyfile(student.folder / CONFIG, place / CONFIG)


def renamed(skeleton: Skeleton, checkpoint: Checkpoint, shape: Shape) -> Iterator[tuple[TensorInfo, str]]:
    """Every stored tensor that the student has, and the name it gets: blocks are numbered anew.

    Blocks beyond the model's depth, which predict further tokens, are left out.
    """
    prefixes = skeleton.names.stored_blocks
    container = re.compile(re.escape(prefixes[0].removesuffix("0.")) + r"(\d+)\.")
    numbers = {index: k for k, index in enumerate(shape.kept)}
    for name, info in checkpoint.infos.items():
        match = container.match(name)
        if match is None:
            yield info, name
        elif int(match[1]) in numbers:
            yield info, prefixes[numbers[int(match[1])]] + name[match.end() :]


def _along(skeleton: Skeleton, index: int, local: str, axis: Axis) -> int:
    """The axis of the stored tensor, which may lie transposed."""
    transposed = skeleton.names.of_block(index, local) in skeleton.names.transposed
    return 1 - axis.axis if transposed else axis.axis


def _cut(checkpoint: Checkpoint, info: TensorInfo, along: int, axis: Axis, narrowed: Narrowed) -> Tensor:
    """A stored tensor without the channels that are left out: rows of what makes them, columns of the
    reader."""
    if axis.axis == 1:
        return (narrowed.reader.t() if along == 0 else narrowed.reader).contiguous()
    stored = checkpoint.load(info.name)
    width = stored.shape[along] // axis.copies
    rows = torch.cat([narrowed.channels + copy * width for copy in range(axis.copies)])
    return stored.index_select(along, rows).contiguous()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def prove(teacher: Skeleton, place: Path, ids: Tensor, expected: Tensor, source: str) -> None:
    """Open the student and run it, as it will be run, on `ids [batch, tokens]`.

    expected: the final hidden states of the teacher without what was left out, `[batch, tokens, hidden]`.
    That the student computes these is the proof that a configuration with fewer blocks, or narrower ones,
    means what was meant. Raises QuantkitError where it does not: blocks that count themselves, or fusions of
    a form of their own.
    """
    student = open_checkpoint(str(place), trust_remote_code=teacher.checkpoint.trust_remote_code)
    skeleton = Skeleton(student, teacher.dtype, teacher.device)
    skeleton.names.check_complete()
    skeleton.load_rest()
    (hidden,) = walk.through(skeleton, [ids])
    last = slice(-CHECKED, None)
    pairs = (hidden, expected), (skeleton.logits(hidden[0, last]), teacher.logits(expected[0, last]))
    tolerance = VERIFY_TOLERANCE[str(teacher.dtype).removeprefix("torch.")]
    for found, wanted in pairs:
        difference = relative_distance(found, wanted)
        if not difference <= tolerance:
            raise QuantkitError(
                f"{source} cannot be cut so: the smaller model differs by {difference:.2g} from the teacher "
                "without what was left out",
                hint="what its blocks compute depends on their number, or on their neighbours",
                exit_code=UNSUPPORTED,
            )
