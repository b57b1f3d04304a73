"""The student as cut from its teacher: a checkpoint folder with the hub's names, written tensor by
tensor."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.distillation.smaller.shape import changes
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.distance import relative_distance
from quantkit.models.files import safetensors_folder
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.models.files.safetensors_folder import CONFIG, TensorInfo
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import walk
from quantkit.quantize.outputs.finish import VERIFY_TOLERANCE

CHECKED = 8  # tokens whose logits are compared


def write(
    skeleton: Skeleton, checkpoint: Checkpoint, kept: Sequence[int], place: Path, shard_bytes: int
) -> None:
    """Write the student of the blocks `kept` into the folder `place`. Tensors keep their bytes."""
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
    """Write the student into the folder `place`, with new values of the tensors in `state`, by their stored
    names."""

    def data(info: TensorInfo) -> Iterator[bytes | memoryview]:
        return iter([_bytes(state[info.name])]) if info.name in state else student.data(info)

    place.mkdir()
    safetensors_folder.write_folder(place, student.infos.values(), shard_bytes, data)
    student.write_companions(place)
    shutil.copyfile(student.folder / CONFIG, place / CONFIG)


def renamed(
    skeleton: Skeleton, checkpoint: Checkpoint, kept: Sequence[int]
) -> Iterator[tuple[TensorInfo, str]]:
    """Yield every stored tensor of the student and its new name: blocks are renumbered.

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
    """Open the student and run it on `ids [batch, tokens]`.

    expected: the final hidden states of the teacher without the other blocks, `[batch, tokens, hidden]`.
    Equal results prove that the configuration with fewer blocks is understood as intended.
    Raises QuantkitError for other results, such as of blocks that depend on their number.
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
                f"{source} cannot be cut: the smaller model differs by {difference:.2g} from the teacher "
                "without these blocks",
                hint="the result of its blocks depends on their number or their neighbours",
                exit_code=UNSUPPORTED,
            )
