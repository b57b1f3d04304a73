"""Whether a job has been run to its end before, for `--resume`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from quantkit.errors import USAGE, QuantkitError, name_all
from quantkit.models import headers
from quantkit.quantize.job import Request, output_of, staging_of
from quantkit.quantize.prepare.fingerprint import differences


def is_finished(request: Request) -> bool:
    """Whether the job's output is there and nothing of it is left to do."""
    staging = staging_of(request)
    return staging.output.exists() and not staging.folder.exists()


def is_done(request: Request) -> bool:
    """Whether the output of this very job is there, by what its manifest says of model and options."""
    return _unlike(request) == []


def check(request: Request) -> bool:
    """`is_done`. Raises QuantkitError, with what differs, if a job of other options was finished there."""
    different = _unlike(request)
    if different:
        output = output_of(request)
        raise QuantkitError(
            f"{output} is finished, and of another job; different: {name_all(different)}",
            f"choose another --output, or replace {output} with --overwrite",
            USAGE,
        )
    return different is not None


def _unlike(request: Request) -> list[str] | None:
    """What a manifest says otherwise than the request; None where no job has been finished there."""
    place = output_of(request)
    described = place / headers.MANIFEST if place.is_dir() else place
    if not is_finished(request) or not described.is_file() or described.suffix not in (".json", ".gguf"):
        return None
    manifest = headers.at(str(place), place).manifest
    if manifest is None:
        return None
    job, run, how = manifest.get("job") or {}, request.run, request.calibration
    made = {"model": (manifest.get("source") or {}).get("name"), "method": manifest.get("method")}
    made |= {key: job.get(key) for key in ("options", "exclude", "override")}
    asked = {"model": Path(request.source).name, "method": request.method}
    asked["options"] = json.loads(json.dumps(dataclasses.asdict(request.options)))
    asked |= {"exclude": list(run.exclude), "override": list(run.override), "towers": run.towers}
    made["towers"] = job.get("towers", False)
    said = job.get("calibration") or {}
    optional = {"samples": how.samples, "seed": how.seed} | ({"seqlen": how.seqlen} if how.seqlen else {})
    for name, value in optional.items():
        asked[name], made[name] = value, said.get(name, value)
    asked["experts"], made["experts"] = run.experts, job.get("experts", run.experts)
    return differences(made, asked)
