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

from quantkit import __version__
from quantkit.distillation.smaller.shape import changes
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.evaluation.comparison.table import markdown
from quantkit.grids.distance import relative_distance
from quantkit.models.files import checksums, hub, safetensors_folder
from quantkit.models.files.checkpoint import MANIFEST, Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.models.files.safetensors_folder import CONFIG, TensorInfo
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import walk
from quantkit.quantize.outputs.finish import VERIFY_TOLERANCE

NOT_TRAINED = "Not trained: on held-out text training did not bring it closer to the teacher."
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


def describe(teacher: Checkpoint, place: Path, record: dict, fingerprint: dict) -> None:
    """Write the manifest quantkit.json and the model card README.md; neither depends on time or place."""
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
    """Return the model card: kept blocks, training text and divergences."""
    local = Path(teacher.source).exists() or not hub.is_id(teacher.source)
    source = Path(teacher.source).name if local else teacher.source
    big, small = record["teacher"], record["student"]
    name, trained = Path(small["output"]).name, record["published"] == "trained"
    blocks = ", ".join(map(str, record["chosen"]["blocks"]))
    table = markdown(record["held_out"]).partition("\n")[2].strip()  # its heading is of quantkit eval
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
