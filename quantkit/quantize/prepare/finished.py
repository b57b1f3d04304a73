"""Find outputs that an earlier run finished, for `--resume`."""

import json
from pathlib import Path

from quantkit.errors import USAGE, name_all, require
from quantkit.models.files import gguf_shards, headers, untrusted
from quantkit.models.machine.device import choose_device
from quantkit.quantize.prepare.request import Request
from quantkit.quantize.staging.fingerprint import differences
from quantkit.text import calibration

TYPED = ("experts", "allow_requantize", "max_shard_gb", "dtype", "batch_size", "sequential", "threads")


def is_finished(request: Request) -> bool:
    """Return whether the output exists and its staging folder does not."""
    staging = request.staging
    return gguf_shards.first(staging.output).exists() and not staging.folder.exists()


def is_made(request: Request) -> bool:
    """Return whether the output is finished. Raises QuantkitError listing the differences if another job made
    it. With --overwrite, every finished output counts as made by the resumed command."""
    if request.overwrite:
        return is_finished(request)
    different = unlike(request)
    refuse_other(request.destination, different or [])
    return different is not None


def refuse_other(output: Path, different: list[str]) -> None:
    """Raise QuantkitError if a finished output differs from the request."""
    what = f"{output} is the finished output of another job; different: {name_all(different)}"
    require(not different, what, f"choose another -o, or replace {output} with --overwrite", USAGE)


def unlike(request: Request) -> list[str] | None:
    """Return how a finished job differs from the request in model, text and options; [] if it does not, None
    if there is no finished job.

    Texts and files are read only if all else is equal. Raises QuantkitError for an invalid manifest.
    """
    path = gguf_shards.first(request.destination)
    described = path / headers.MANIFEST if path.is_dir() else path
    if not is_finished(request) or not described.is_file() or described.suffix not in (".json", ".gguf"):
        return None
    manifest = headers.at(str(path), path).manifest
    if manifest is None:
        return None
    what, hint = f"{headers.MANIFEST} of {path}", f"replace {path} with --overwrite"
    untrusted.check_schema(manifest, headers.MANIFEST_SCHEMA, what, hint)
    job = manifest.get("job") or {}
    if different := differences(*_compared(request, manifest, job)):
        return different
    checkpoint = request.open()
    if stored := job.get("calibration"):
        requested = calibration.load(checkpoint, request.calibration, request.offline).record()
        requested = json.loads(json.dumps(requested))
        if different := differences({"calibration": stored}, {"calibration": requested}):
            return different
    source = manifest.get("source") or {}
    return differences({"source_sha256": source.get("sha256")}, {"source_sha256": checkpoint.sha256()})


def _compared(request: Request, manifest: dict, job: dict) -> tuple[dict, dict]:
    """Return the options of the finished job and the requested ones; options that the request
    leaves open take the finished job's values."""
    run = request.run
    typed = {name: getattr(run, name) for name in TYPED}
    typed["device"] = "auto" if run.device == "auto" else str(choose_device(run.device))
    requested = {name: value for name, value in typed.items() if value not in (None, "auto")}
    requested |= {"exclude": list(run.exclude), "override": list(run.override)}
    requested |= {"options": request.method.record(), "method": request.method.name}
    requested["model"] = Path(request.source).name
    finished = dict.fromkeys(("options", "exclude", "override")) | job | (job.get("execution") or {})
    finished |= {"method": manifest.get("method"), "model": (manifest.get("source") or {}).get("name")}
    return {name: finished.get(name, value) for name, value in requested.items()}, requested
