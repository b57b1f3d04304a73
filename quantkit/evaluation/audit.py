"""An audit: run the job of a finished output again from its source, and compare what it writes.

Weights are compared block by block (solved_again.py), small files whole. The statement says what was compared
and on which machine.
"""

import json
import random
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.errors import NOT_FOUND, UNSUPPORTED, USAGE, QuantkitError, require
from quantkit.evaluation.solved_again import Steps, compare
from quantkit.models.files import gguf_shards, headers, untrusted
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine.device import machine_of
from quantkit.quantize.job import prepare
from quantkit.quantize.outputs.folder import TIMINGS, recipe_of
from quantkit.quantize.prepare import recipe
from quantkit.quantize.prepare.request import Request
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.fingerprint import versions

SCHEMA = "quantkit.reproduction/1"
CANNOT = "the manifest of {} records no job that could run again"
EXECUTION = ("dtype", "batch_size", "sequential", "threads")


def wanted(reproduce: str | int | None, base: str | None) -> int | None:
    """Return the number of blocks that `--reproduce` asks for; None for all. Raises QuantkitError for other
    values, and without a base."""
    require(base or reproduce is None, "--reproduce needs the original model", "add --base MODEL", USAGE)
    if reproduce in (None, "all"):
        return None
    valid = str(reproduce).isdecimal() and int(reproduce) > 0
    require(valid, f"--reproduce {reproduce} is no number of blocks", "write 2, or all", USAGE)
    return int(reproduce)


def add(
    record: dict[str, Any],
    base: str,
    blocks: int | None,
    seed: int | None,
    calibration: str | None,
    trust_remote_code: bool,
    progress: Progress,
) -> None:
    """Add an audit's statement and problems to the record of `inspection.verify`, unless files are damaged.

    blocks: how many are solved again, chosen by the seed; None: all. seed: None: a new one. calibration: the
    text, if it is not the one that the manifest names. Raises QuantkitError if the job cannot run again.
    """
    if record["problems"] and not record["linears"]:  # it was not even decoded
        record["notes"].append("no block was solved again")
        return
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    path = gguf_shards.first(Path(record["source"]))
    contents = headers.at(str(path), path)
    manifest = contents.manifest or {}
    stored = open_checkpoint(record["source"], trust_remote_code=trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="quantkit-", ignore_cleanup_errors=True) as folder:
        try:
            request = _request(manifest, base, Path(folder) / gguf_shards.whole(path).name, calibration)
            request = replace(request, trust_remote_code=trust_remote_code)
            job = prepare(request, Steps(progress))
        except QuantkitError as error:
            if error.exit_code != USAGE:
                raise
            what = f"{CANNOT.format(path.name)}: {error.message}"  # nobody typed its values
            raise QuantkitError(what, "audit what quantkit wrote", UNSUPPORTED) from error
        made, text = manifest["job"], job.calibration and job.calibration.record()
        here = versions()
        there = {name: made.get(name) for name in here} | {"machine": _machine(path, manifest)}
        here["machine"] = machine_of(job.skeleton.device)
        problems, found = [], {"blocks": [], "linears": []}
        if job.source_sha256.result() != (manifest.get("source") or {}).get("sha256"):
            problems.append(f"{base} is not the source that the manifest names (sha256)")
        if text and text["sha256"] != (made["calibration"] or {}).get("sha256"):
            problems.append(f"the tokens of {text['source']} are not those that the manifest names (sha256)")
        if not problems:
            unknown = there == here | {"machine": None}
            found = compare(job, stored, blocks, seed, unknown or here == there, progress)
            if unknown and found["problems"]:  # perhaps it was another
                job = prepare(replace(request, overwrite=True), Steps(progress))
                found = compare(job, stored, blocks, seed, False, progress)
            problems = [*job.method.output.unlike(job.material, contents), *found.pop("problems")]
    files = {"files": manifest["files"]} if "files" in manifest else {}
    verdict = "identical" if all(row["identical"] for row in found["linears"]) else "equivalent"
    record["problems"] += problems
    record["reproduction"] = {
        "schema": SCHEMA,
        "source": {"name": job.checkpoint.name, "sha256": job.source_sha256.result()},
        "output": {"name": path.name, "sha256": stored.sha256()} | files,
        "calibration": text,
        "made_with": there,
        "audited_with": here,
        "seed": seed,
        **found,
        "verdict": "different" if problems else verdict,
    }


def _request(manifest: Mapping[str, Any], base: str, output: Path, calibration: str | None) -> Request:
    """Return the request of the job that a manifest records. Raises QuantkitError if it cannot run again."""
    changed = next((word for word in ("converted", "distilled") if word in manifest), "")
    what = f"{output.name} was {changed} after the job that its manifest records"
    require(not changed, what, "audit the checkpoint that the job wrote", UNSUPPORTED)
    try:
        job, text = manifest["job"], manifest["job"]["calibration"] or {}
        run = {name: job["execution"][name] for name in EXECUTION}
        run |= {"device": "cpu" if job["execution"]["device"] == "cpu" else "auto", "loss_tokens": 0}
        run |= {"experts": job.get("experts", "shrink"), "allow_requantize": job["allow_requantize"]}
        made = recipe.parse(headers.MANIFEST, headers.MANIFEST, recipe_of(manifest))
        revision, like = (text.get("dataset") or {}).get("revision"), job["options"].get("like")
        sizes = bool(job["options"].get("group_size"))
    except (LookupError, TypeError, AttributeError) as error:
        raise QuantkitError(CANNOT.format(output.name), "audit what quantkit wrote", UNSUPPORTED) from error
    what = f"the job of {output.name} used no calibration text"
    require(job["calibration"] or not calibration, what, "leave out --calibration", UNSUPPORTED)
    what = "the types of --like are those of a file that the manifest does not name"
    require(not like, what, "audit what was made with other options", UNSUPPORTED)
    source = str(text.get("source", "shipped"))  # of a file the bare name
    what = f"the calibration text of {output.name} is {source!r}, which names no file here"
    named = calibration or text.get("dataset") or Path(source).name == source
    require(named, what, "give it with --calibration", NOT_FOUND)
    typed = {"model": base, "output": output, "allow_unread": True}
    if calibration:
        typed["calibration"] = calibration
    elif revision:
        typed["calibration_revision"] = revision
    settings = [f"run.{name}={json.dumps(value)}" for name, value in run.items()]
    return recipe.merge(made, settings, typed, open_groups=sizes)  # linears without a size stay in 16 bit


def _machine(path: Path, manifest: Mapping[str, Any]) -> str | None:
    """Return the kind of machine that made an output; None if unknown: GGUF files do not store it."""
    try:
        machine = untrusted.parse(untrusted.read(path / TIMINGS))["machine"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return None if manifest.get("ranks") else machine
