"""Writes the student's files with trained floats: copies them, overwrites the floats, and verifies the copy.

No tensor changes its offset or size, so clients of the student load the result.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from quantkit import __version__
from quantkit.distillation.student import Floats, Student
from quantkit.errors import UNSUPPORTED, VERIFICATION, QuantkitError, require
from quantkit.inspection import clients
from quantkit.inspection.record import describe
from quantkit.inspection.verify import ERRORS
from quantkit.models.files import card, checksums, gguf_writer, untrusted
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.headers import LOSS, MANIFEST, MANIFEST_SCHEMA, open_contents
from quantkit.models.files.open import open_checkpoint
from quantkit.models.files.reading import DTYPES
from quantkit.models.gguf.checkpoint import GgufCheckpoint
from quantkit.quantize.outputs.finish import FAULTY, refuse_unlike
from quantkit.quantize.outputs.folder import TIMINGS, write_json

MANIFEST_HINT = "copy or download it again"
IN_FILE = "quantkit.manifest"  # the manifest's key in a GGUF file
Patch = tuple[Path, int, bytes]  # file, offset, new bytes


def write(student: Student, floats: Floats | None, record: dict, target: Path, output: Path) -> None:
    """Write the output to `target`, a folder or a GGUF file, which becomes `output`. floats: by name in the
    model; None leaves all tensors unchanged. record: JSON for manifest and model card. The card of a file is
    next to it, and does not replace another tool's.
    """
    checkpoint = student.checkpoint
    changes = patches(student, floats) if floats is not None else iter(())
    manifest = _manifest(checkpoint, record)
    if isinstance(checkpoint, GgufCheckpoint):
        if manifest is None:
            manifest = {"schema": "quantkit.manifest/1", "quantkit": __version__, "distilled": record}
        text = json.dumps(manifest, ensure_ascii=False)
        moved = gguf_writer.with_text(checkpoint.folder, target, IN_FILE, text)
        for _, start, data in changes:
            _write(target, start + moved, data)
        gguf_writer.fill(target, LOSS, "")
        gguf_writer.seal(target)
        place = card.path_of(output)
        if card.is_free(place):
            _write_card(checkpoint, target, place, record, output.name)
        return
    target.mkdir()
    paths = sorted(path for path in untrusted.entries(checkpoint.folder) if path.is_file())
    checkpoint.copy((path for path in paths if path.name not in (card.CARD, MANIFEST, TIMINGS)), target)
    for path, start, data in changes:
        _write(target / path.name, start, data)
    if manifest is not None:
        write_json(target / MANIFEST, manifest | {"files": checksums.of_folder(target)})
    _write_card(checkpoint, target, target / card.CARD, record, output.name)


def patches(student: Student, floats: Floats) -> Iterator[Patch]:
    """Yield (file, offset, new bytes) for every tensor whose floats change, block by block."""
    checkpoint, names = student.checkpoint, student.skeleton.names
    for index in range(student.depth):
        with student.block(index) as block:
            inside = block.of_model(floats)
            for local, layout in block.layouts.items():
                stored = names.stored_of(index, f"{local}.weight")
                parts = checkpoint.parts(stored)
                tensors = layout.with_floats(parts, block.of_linear(local, inside))
                names_of_parts = dict(zip(parts, checkpoint.stored_as(stored), strict=False))
                for suffix, tensor in tensors.items():  # "ggml_type" is not stored, and stays
                    if tensor is not parts[suffix]:
                        yield _patch(checkpoint, names_of_parts[suffix], tensor)
            for name in block.dtypes:
                yield _patch(checkpoint, names.stored_of(index, name), inside[name])
    for name in student.rest().dtypes:
        yield _patch(checkpoint, names.stored[name], floats[name])


def _patch(checkpoint: Checkpoint, name: str, tensor: Tensor) -> Patch:
    """Return (file, offset, bytes) that replaces a stored tensor."""
    if isinstance(checkpoint, GgufCheckpoint):
        return checkpoint.folder, *checkpoint.placed(name, tensor)
    info = checkpoint.infos[name]
    fresh = tensor.to(DTYPES[info.dtype]).clone(memory_format=torch.contiguous_format)
    data = fresh.view(-1).view(torch.uint8).numpy().tobytes()
    assert len(data) == info.nbytes, f"{name}: {len(data)} bytes for {info.nbytes}"
    return info.file, info.offset, data


def _write(path: Path, start: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(data)


def manifest_of(checkpoint: Checkpoint) -> dict | None:
    """Return a checkpoint's manifest, or None. Raises QuantkitError if it cannot be parsed."""
    if (text := checkpoint.manifest()) is None:
        return None
    try:
        manifest = untrusted.parse(text.encode())
    except ValueError as error:
        what = f"{MANIFEST} of {checkpoint.source}: {error}"
        raise QuantkitError(what, MANIFEST_HINT, UNSUPPORTED) from error
    untrusted.check_schema(manifest, MANIFEST_SCHEMA, f"{MANIFEST} of {checkpoint.source}", MANIFEST_HINT)
    return manifest


def _manifest(checkpoint: Checkpoint, record: dict) -> dict | None:
    """Return the student's manifest with the record, without outdated errors and loss; None without one."""
    if (stored := manifest_of(checkpoint)) is None:
        return None
    for row in stored.get("linears", ()):  # outdated, since the floats changed
        for name in ERRORS:
            row.pop(name, None)
    stored.pop("loss", None)
    return stored | {"distilled": record}


def _write_card(checkpoint: Checkpoint, target: Path, place: Path, record: dict, name: str) -> None:
    """Write the model card of `target` to `place`: the student's, with what changed, and a section on
    distillation. Text of another tool's card does not change. name: of the finished output."""
    path = card.path_of(checkpoint.folder)
    head, text = card.read(path)
    if head.get("quantized_by") != "quantkit":
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        place.write_text(text + _card(record, name))
        return
    head.pop("model-index", None)  # outdated, as the loss is
    text = re.sub(r"^KL divergence from the original: .*\n\n?", "", text, flags=re.MULTILINE)
    text = card.renamed(text, checkpoint.name if path.name == card.CARD else path.stem, name)
    load = clients.how_to_load(describe(open_contents(str(target)))["clients"], name)
    text = card.section(text, "load", load)
    evaluate = f"`quantkit eval {record['teacher']['name']} {name} --text TEXT --card {name}`"
    text = card.section(text, "eval", f"On a text of yours: {evaluate}.")
    card.write(place, head, text + _card(record, name))


def _card(record: dict, name: str) -> str:
    """Return the section on distillation for the model card."""
    made, stages = record["calibration"], record["stages"]
    done = [f"{stage['name']} {'kept' if stage['kept'] else 'left out'}" for stage in stages]
    return (
        f"\n## Distilled\n\nBy quantkit {__version__} from {record['teacher']['name']}: scales, norms and "
        f"biases were trained, codes are as they were ({'; '.join(done)}).\n"
        f"KL divergence from the teacher on held-out calibration text: {record['before']:.5f} before, "
        f"{record['after']:.5f} after.\n"
        f"Text: {made['samples']} sequences of {made['seqlen']} tokens of {made['source']} text (sha256 "
        f"{made['sha256'][:16]}…), of which {record['held_out']} were held out.\n"
        "Evaluate the gain: `quantkit eval "
        f"{record['teacher']['name']} {record['student']['name']} {name} --text TEXT`.\n"
    )


def verify(student: Student, floats: Floats | None, path: Path, ids: Tensor) -> None:
    """Read the output back and compare it with the student.

    Raises QuantkitError (exit code 6) if codes differ, or if final hidden states for `ids [batch, tokens]`
    differ from the student's with these floats.
    """
    written = open_checkpoint(str(path), trust_remote_code=student.checkpoint.trust_remote_code)
    again = Student(written, student.skeleton.dtype, student.skeleton.device)
    again.skeleton.load_rest()
    expected, hidden = student.skeleton.embed(ids), again.skeleton.embed(ids)
    for index in range(again.depth):
        with student.block(index) as before, again.block(index) as after:
            odd = [n for n in before.weights if not before.weights[n].codes.equal(after.weights[n].codes)]
            same = not odd and before.weights.keys() == after.weights.keys()
            what = f"the checkpoint read back from {path} has other codes in block {index + 1}"
            require(same, what, FAULTY, VERIFICATION)
            now = before.floats
            if floats is not None:
                now = {name: value.to(hidden.device) for name, value in before.of_model(floats).items()}
            (expected,) = student.outputs(before, [expected], now)
            (hidden,) = again.outputs(after, [hidden], after.floats)
    dtype = str(student.skeleton.dtype).removeprefix("torch.")
    refuse_unlike({"hidden states": (hidden, expected)}, dtype, path)
