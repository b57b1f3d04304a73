"""Verifies a checkpoint against its manifest: files, values, and errors of the linears.

A manifest is not signed: verification finds damage and mistakes, not forgery.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import NOT_FOUND, UNSUPPORTED, QuantkitError, count, name_all, require
from quantkit.grids.distance import error_up_to_scales, weight_error
from quantkit.inspection import record, values
from quantkit.inspection.values import Listener
from quantkit.models.files import checksums, gguf_shards, untrusted
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.headers import CONFIG, MANIFEST, MANIFEST_SCHEMA, Contents, open_contents
from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton import Skeleton

SCHEMA = "quantkit.verify/2"
ERRORS = {"weight_error": weight_error, "weight_error_up_to_scales": error_up_to_scales}  # names in manifests
ERROR_TOLERANCE = 1e-4  # relative: other processors change errors by 2e-6, one code of 4 bits by up to 1e-3
LEAST_ERROR = 1e-9  # errors smaller than this are rounding of float32
WRITTEN_LATER = {MANIFEST, "README.md", "quantkit-timings.json"}  # files written after the checksums
AGAIN = "copy or download it again"
CPU = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # dtypes of jobs, besides float32


def verify(
    source: str, base: str | None, listen: Listener, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Verify a folder or GGUF file; return JSON that lists `problems`. base: the original model, if errors
    are to be measured again.

    Raises QuantkitError if there is nothing to verify, or if `base` is another model.
    """
    path = gguf_shards.first(Path(source))
    if not path.exists():
        raise QuantkitError(f"no such folder or file: {source}", "give a checkpoint on this disk", NOT_FOUND)
    result: dict[str, Any] = {"schema": SCHEMA, "source": source, "made": None, "files": [], "linears": []}
    result |= {"notes": [], "problems": []}
    try:
        contents = open_contents(source)
        manifest = contents.manifest or {}
        untrusted.check_schema(manifest, MANIFEST_SCHEMA, MANIFEST, AGAIN)
        known = {*MANIFEST_SCHEMA["properties"], "quantkit"} & manifest.keys()
        what = f"{MANIFEST} holds nothing that quantkit writes"
        require(known or not (path / MANIFEST).is_file(), what, AGAIN, UNSUPPORTED)
    except QuantkitError as error:
        if not (path.suffix == ".gguf" or (path / MANIFEST).is_file() or (path / CONFIG).is_file()):
            raise  # not a checkpoint that quantkit wrote
        return result | {"problems": [error.message]}
    made = record.describe(contents)
    result["made"] = made["provenance"]
    result["files"] = list(_files(contents, manifest, result, listen))
    different = [file for file in result["files"] if file["state"] != "same"]
    result["problems"] += [f"{file['name']} {file['state']}" for file in different]
    result["problems"] += [
        problem
        for problem in made["integrity"]["problems"]
        if not any(file["name"] in problem for file in different)  # without consequences of these files
    ]
    if result["problems"]:  # do not decode damaged files
        result["notes"].append("values were not read" + ", and errors not measured" * (base is not None))
        return result
    checkpoint = open_checkpoint(source, trust_remote_code=trust_remote_code)
    values.check(checkpoint, made, listen)
    result["problems"] += made["integrity"]["problems"]
    result["notes"] += made["integrity"]["notes"] + made["integrity"]["warnings"]
    if base is not None:
        original = open_checkpoint(base, trust_remote_code=trust_remote_code)
        result["linears"] = list(_linears(checkpoint, original, manifest, result, listen))
        result["problems"] += [
            f"{linear['name']} is {linear['error']:.4g} from its source, "
            f"the manifest says {linear['recorded']:.4g}"
            for linear in result["linears"]
            if not linear["agrees"]
        ]
    return result


def _files(
    contents: Contents, manifest: Mapping[str, Any], result: dict[str, Any], listen: Listener
) -> Iterator[dict[str, Any]]:
    """Yield a row with the state of each file that has a checksum: `same`, `was changed`, `is absent`."""
    root, read, whole = contents.path, 0, sum(contents.files.values())
    assert root is not None

    def advance(nbytes: int) -> None:
        nonlocal read
        read += nbytes
        listen("hashing, in MB", *(math.ceil(nbytes / 1e6) for nbytes in (min(read, whole), whole)))

    if contents.container == "gguf":
        from quantkit.models.files import gguf_file, gguf_writer  # `gguf` takes a while to import

        key = checksums.IN_SHARD if len(contents.files) > 1 else checksums.IN_FILE
        for path in gguf_shards.of(root):
            header = gguf_file.read_whole_header(path)
            recorded = header.metadata.get(key)
            if isinstance(recorded, str):
                changed = gguf_writer.sum_of(path, header, advance) != recorded
                yield {"name": path.name, "state": "was changed" if changed else "same"}
            else:
                result["notes"].append(f"{path.name} holds no sum: quantkit 0.3 writes one")
        return
    recorded = manifest.get("files")
    if recorded is None:
        why = "its manifest has none" if manifest else f"it has no {MANIFEST}"
        result["notes"].append(f"files were not compared with sums: {why}")
        return
    sums = checksums.of_folder(root, WRITTEN_LATER - recorded.keys(), advance)
    for name, digest in recorded.items():  # a manifest must not name other folders
        state = "same" if sums.get(name) == digest else "was changed" if name in sums else "is absent"
        yield {"name": name, "state": state}
    added = sorted(contents.files.keys() - recorded.keys() - WRITTEN_LATER)
    if added:
        result["notes"].append(f"{count(len(added), 'file')} came later: {name_all(added)}")


def _linears(
    checkpoint: Checkpoint,
    base: Checkpoint,
    manifest: Mapping[str, Any],
    result: dict[str, Any],
    listen: Listener,
) -> Iterator[dict[str, Any]]:
    """Yield a row for every linear: its error, measured again, and the error in the manifest."""
    job = manifest.get("job", {})
    rows = [row for row in manifest.get("linears", ()) if _measure(row)]
    if not rows:
        why = "the manifest records no errors to compare with"
        if "distilled" in manifest:
            why = "distilling changed the scales that the recorded errors are of"
        result["notes"].append(f"errors were not measured: {why}")
        return
    source, damaged = (manifest.get("source") or {}).get("sha256"), bool(result["problems"])
    if isinstance(source, str) and base.sha256() != source:
        result["problems"].append(
            f"{base.source} is not the source that the manifest names (sha256 {source[:12]}…): "
            "it is another model, or was changed since"
        )
    dtype = DTYPES.get(str((job.get("execution") or {}).get("dtype", job.get("dtype"))), torch.float32)
    sides = [Skeleton(made, dtype, CPU) for made in (checkpoint, base)]
    weights = [side.stored_parameters() for side in sides]
    shapes = [{name: tensor.shape for name, tensor in side.items()} for side in weights]
    stored = {kept: name for side in sides for name, kept in side.names.stored.items()}  # of both containers
    entries = {stored.get(f"{row['name']}.weight", row["name"]): row for row in rows}
    lost = sorted(
        row["name"] for name, row in entries.items() if shapes[0].get(name) != shapes[1].get(name, ())
    )
    linears = f"{count(len(lost), 'linear')} of the manifest: {name_all(lost, 3)}"
    what = f"{base.source} and {checkpoint.source} do not share {linears}"
    if lost and damaged:
        result["notes"].append("errors were not measured")
        return
    require(not lost, what, "give the model that was quantized", UNSUPPORTED)
    for done, (name, entry) in enumerate(entries.items(), start=1):
        decoded, weight = (side.read(name, own[name]) for side, own in zip(sides, weights, strict=True))
        kind = _measure(entry)
        error, recorded = ERRORS[kind](weight.float(), decoded), float(entry[kind])
        agrees = abs(error - recorded) <= ERROR_TOLERANCE * recorded + LEAST_ERROR
        yield {"name": entry["name"], "measure": kind, "error": error, "recorded": recorded, "agrees": agrees}
        listen("measuring errors again", done, len(entries))


def _measure(entry: Mapping[str, Any]) -> str | None:
    """Return the name of the error that a linear's entry in the manifest contains, or None."""
    errors = [kind for kind in ERRORS if isinstance(entry.get(kind), (int, float))]
    return errors[0] if errors and isinstance(entry.get("name"), str) else None
