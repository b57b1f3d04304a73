"""An audit: solve blocks of a finished output again from its source, and compare them with the stored ones.

The loop runs as in a resumed job that has staged all blocks but those to be solved: these others are read
from the output. On the machine of the job, with its versions, all values must be equal. Elsewhere sums round
differently, and error feedback turns many codes over. Then the stored linears run as well, so that each is
judged alone: it may lose LINEAR_BOUND more than the one solved again, and a row ROW_BOUND. Noise may also
reverse the move of a target (`retarget`), which adds up to MOVE_BOUND times the loss of the move. The
measurements from which the bounds follow are in docs/verify.md.
"""

import json
import math
import random
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from quantkit import __version__
from quantkit.errors import NOT_FOUND, UNSUPPORTED, USAGE, QuantkitError, count, name_all, require
from quantkit.grids.grid import QuantizedWeight
from quantkit.inspection.names import split
from quantkit.layouts import LinearSpec, Statistic
from quantkit.layouts.ggml.blocks import decode_rows
from quantkit.models.files import gguf_shards, headers, reading, untrusted
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint, watched
from quantkit.models.gguf.checkpoint import GgmlTensor, GgufCheckpoint
from quantkit.models.machine.device import machine_of
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate.sites import Block
from quantkit.quantize.calibrate.statistics import SiteStatistics
from quantkit.quantize.job import Job, prepare
from quantkit.quantize.loop import Loop
from quantkit.quantize.outputs.folder import TIMINGS, recipe_of
from quantkit.quantize.prepare import recipe
from quantkit.quantize.prepare.request import Request
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers import Solved, Solver, row_losses
from quantkit.quantize.solving import Quantizer
from quantkit.quantize.transforms.fold import Producer
from quantkit.quantize.transforms.scaling import ColumnScaling, Losses

SCHEMA = "quantkit.reproduction/1"
LINEAR_BOUND, ROW_BOUND, MOVE_BOUND = 0.05, 2.0, 4.0  # in losses of a linear solved again, and of its move
COUPLED_BOUND = 4.0  # of a row, where a solver lets rows compensate for each other
SCALE_BOUND = 0.01  # relative: a scaled vector in bfloat16 turns over by 1/128
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
    manifest = headers.at(str(path), path).manifest or {}
    stored = open_checkpoint(record["source"], trust_remote_code=trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="quantkit-", ignore_cleanup_errors=True) as folder:
        request = _request(manifest, base, Path(folder) / path.name, calibration)
        job = prepare(replace(request, trust_remote_code=trust_remote_code), _Steps(progress))
        made, text = manifest["job"], job.calibration and job.calibration.record()
        here = {"quantkit": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
        there = {name: made.get(name) for name in here} | {"machine": _machine(path, manifest)}
        here["machine"] = machine_of(job.skeleton.device)
        problems, found = [], {"blocks": [], "linears": []}
        if job.source_sha256.result() != (manifest.get("source") or {}).get("sha256"):
            problems.append(f"{base} is not the source that the manifest names (sha256)")
        if text and text["sha256"] != made["calibration"].get("sha256"):
            problems.append(f"the tokens of {text['source']} are not those that the manifest names (sha256)")
        if not problems:
            found = _compared(job, stored, blocks, seed, here == there, progress)
            problems = found.pop("problems")
    verdict = "identical" if all(row["identical"] for row in found["linears"]) else "equivalent"
    record["problems"] += problems
    record["reproduction"] = {
        "schema": SCHEMA,
        "source": {"name": job.checkpoint.name, "sha256": job.source_sha256.result()},
        "output": {"name": path.name, "sha256": stored.sha256()},
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
        what = f"the manifest of {output.name} records no job that could run again"
        raise QuantkitError(what, "audit what quantkit wrote", UNSUPPORTED) from error
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


def _compared(
    job: Job, stored: Checkpoint, blocks: int | None, seed: int, exact: bool, progress: Progress
) -> dict[str, Any]:
    """Solve blocks again, and compare these and the tensors that the job copies with the stored ones."""
    solved = [spec for spec in job.specs if spec.grid]
    what = f"{stored.source} was encoded tensor by tensor, not block by block"
    require(solved, what, "make it again with the same options, and compare the files", UNSUPPORTED)
    names = {spec.name for spec in solved}
    stored = Skeleton(stored, job.skeleton.dtype, job.skeleton.device).checkpoint  # with single experts
    stored = stored.coded(names) if isinstance(stored, GgufCheckpoint) else stored
    unlike = names ^ {*stored.packed}
    what = f"{stored.source} has no codes to compare of {name_all(sorted(unlike), 3)}"
    require(not unlike, what, "audit a file of another type", UNSUPPORTED)
    there = sorted({spec.block for spec in solved if not spec.embedding})
    what = f"--reproduce {blocks}: {stored.source} has {count(len(there), 'quantized block')}"
    require((blocks or 0) <= len(there), what, "write a smaller number, or all", USAGE)
    chosen = sorted(random.Random(seed).sample(there, blocks or len(there)))
    solving = f"solving {len(chosen)} of {count(len(there), 'block')} again"
    progress.phase(f"{solving}; the run ends with block {chosen[-1] + 1}")
    with job.staging.opened(job.fingerprint, resume=False, lasting=False), watched(job.checkpoint):
        loop = _Again(job, stored, chosen, exact, progress)
        loop.through([index not in chosen for index in range(chosen[-1] + 1)])
        rows = [*_outside(job, stored), *loop.rows]
        bound = COUPLED_BOUND if Statistic.CURVATURE in job.method.needs else ROW_BOUND
        problems = [_problem(row) for row in rows if not _agrees(row, exact, bound)]
        problems += _others(job, stored, chosen, exact)
    return {"blocks": chosen, "of_blocks": len(there), "linears": rows, "problems": problems}


class _Steps(Progress):
    """Passes the steps of a job on, without the warnings that it gave when it ran first. No block counts
    as done: the blocks before a chosen one run again."""

    def __init__(self, progress: Progress):
        self.phase, self.block = progress.phase, progress.block
        self.start = lambda blocks, done: progress.start(blocks, 0)


class _Again(Loop):
    """The loop of a job whose blocks, except the chosen ones, are those of its finished output. exact: the
    output must be equal. rows: how the linears solved again differ."""

    def __init__(self, job: Job, stored: Checkpoint, chosen: Sequence[int], exact: bool, progress: Progress):
        self.stored, self.chosen, self.exact, self.rows = stored, chosen, exact, list[dict[str, Any]]()
        super().__init__(job, _Steps(progress))
        self.method = replace(job.method, solver=_Remembering(job.method.solver))
        self.quantizer = partial(_Comparing, stored=stored, rows=self.rows, exact=exact)

    def _done(self) -> list[bool]:
        return [index not in self.chosen for index in range(len(self.skeleton.blocks))]

    def _written(self, index: int) -> Checkpoint:
        return self.stored

    def _block(self, index: int, module: nn.Module) -> Block:
        block, transform = super()._block(index, module), self.job.method.transform
        if transform and not self.exact:
            changed = copy(transform)
            search = partial(self._scale, block, transform)
            vars(changed).update(search=search, enough={**transform.enough, 1: math.inf})
            self.method = replace(self.method, transform=changed)
        return block

    def _scale(
        self, block: Block, transform: ColumnScaling, losses: Losses, producer: Producer, *entering: Any
    ) -> Tensor | None:
        """Return the scale with the least loss; for a norm, the scale by which the stored one was divided if
        these two differ: elsewhere a search may end at another scale of equal worth."""
        searched = transform.search(losses, producer, *entering)
        weight, extra = block.module.get_submodule(producer.name).weight, float(producer.one_plus)
        if weight.ndim > 1:
            return searched
        stored = self.stored.load(self.skeleton.names.stored_of(block.index, f"{producer.name}.weight"))
        scale = (weight.float() + extra) / (stored.to(weight.device).float() + extra)
        scale = torch.where(scale.isfinite() & (scale > 0), scale, 1.0)[producer.rows]
        if searched is not None and torch.allclose(searched, scale, 1e-5):
            return searched
        return None if bool((scale == 1).all()) else scale


class _Remembering:
    """A solver that remembers target and Hessian of every linear of a visit, in order."""

    def __init__(self, solver: Solver):
        self._solver, self.given = solver, deque[tuple[Tensor, Tensor | None]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._solver, name)

    def solve(self, *site: Any) -> list[Solved]:
        return self.solve_many([site])[0]

    def solve_many(self, sites: Sequence[tuple]) -> list[list[Solved]]:
        self.given += [(weight, hessian) for weights, _, hessian, *_ in sites for weight in weights]
        return self._solver.solve_many(sites)


@dataclass(frozen=True)
class _Comparing(Quantizer):
    """Compares each linear solved again with the stored one. Unless they must be equal, the stored one runs:
    later linears compensate for its errors."""

    stored: Checkpoint | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    exact: bool = True

    def _installed(
        self, spec: LinearSpec, quantized: QuantizedWeight, weight: Tensor, statistics: SiteStatistics
    ) -> Tensor:
        target, hessian = self.solver.given.popleft()
        values = super()._installed(spec, quantized, weight, statistics)
        again, there = self.parts.parts(spec.name), self.stored.parts(f"{spec.name}.weight")
        if again.keys() == there.keys() and all(_same(there[part], again[part]) for part in again):
            self.rows.append(_row(spec.name, torch.zeros_like(weight, dtype=torch.bool)))
            return values
        decoded = self.stored.layout.at(spec.name).decode(there)
        unlike = decoded.codes.to(weight.device) != quantized.codes
        deltas = decoded.values().to(weight.device) - target, quantized.values() - target, target - weight
        losses = [row_losses(d, hessian) if hessian is not None else d.square().sum(1) for d in deltas]
        self.rows.append(_row(spec.name, unlike, losses))
        return values if self.exact else self.skeleton.install(spec, self.layout, dict(there))


def _outside(job: Job, stored: Checkpoint) -> Iterator[dict[str, Any]]:
    """Yield how embedding and head outside the blocks differ from those quantized again, by their values."""
    again = {}
    for spec in (spec for spec in job.specs if spec.embedding):
        parts = {name.rpartition(".")[2]: part for name, part in job.staging.read(spec.block).items()}
        again[spec.name] = job.method.layout.at(spec.name).values(parts)
    coded = {i.target.name: i for i in stored.infos.values() if isinstance(i, GgmlTensor)}
    for name, rows in job.staging.rest().items():
        info = coded[name]
        values = decode_rows(info.dtype, reading.tensor(rows), info.shape[1])
        again[info.name.removesuffix(".weight")] = values
    for name, values in again.items():
        there, weight = (side.read(f"{name}.weight", torch.float32) for side in (stored, job.checkpoint))
        losses = [(side - weight).square().sum(1) for side in (there, values.float(), weight)]
        yield _row(name, there != values, None if _same(there, values) else losses)


def _row(name: str, unlike: Tensor, losses: Sequence[Tensor] | None = None) -> dict[str, Any]:
    """Return an entry of `linears`. unlike: codes that differ, `[out, in]`. losses: of the rows: as stored,
    as solved again, and of the move of the target; None: all values are equal."""
    row = {"name": name, "identical": losses is None, "codes": unlike.numel(), "different": int(unlike.sum())}
    row |= {"rows": int(unlike.any(1).sum()), "excess": 0.0, "row_excess": 0.0, "moved": 0.0}
    if losses:
        there, again, move = losses
        mean, noise = again.mean().clamp(min=1e-30), MOVE_BOUND * move.clamp(min=move.mean())
        row |= {"excess": float(there.mean() / mean - 1), "moved": float(move.mean() / mean)}
        row["row_excess"] = float(((there - again - noise) / again.clamp(min=mean)).max())
    return row


def _agrees(row: Mapping[str, Any], exact: bool, row_bound: float) -> bool:
    bound = LINEAR_BOUND + MOVE_BOUND * row["moved"]
    near = row["excess"] <= bound and row["row_excess"] <= row_bound
    return row["identical"] or (near and not exact)


def _problem(row: Mapping[str, Any]) -> str:
    codes = f"{row['different']:,} of {row['codes']:,} codes, in {count(row['rows'], 'row')}"
    return f"{row['name']} was not solved so: {codes}, differ, loss {row['excess']:+.1%}"


def _others(job: Job, stored: Checkpoint, chosen: Sequence[int], exact: bool) -> Iterator[str]:
    """Yield problems: tensors that are not the source's, or not scaled as in the blocks solved again."""
    suffixes, rest = job.method.layout.suffixes, job.staging.rest()
    packed = {f"{spec.name}.{part}" for spec in job.specs if spec.grid for part in suffixes}
    scaled = {name: info for index in chosen for name, info in job.staging.infos(index).items()}
    for name in scaled.keys() - packed:
        there, again = stored.load(name), reading.tensor(scaled[name])
        near = bool(((there.float() - again).abs() <= SCALE_BOUND * again.abs()).all())
        if not (_same(there, again) or (near and not exact)):
            yield f"{name} is not scaled as when its block was solved again"
    for name in job.material.untouched().keys() - scaled.keys():
        info, block = stored.infos.get(name), split(name)[1]
        other = block is not None and block not in chosen  # its vectors may be scaled
        if (job.method.transform and other) or (isinstance(info, GgmlTensor) and info.target.name in rest):
            continue
        if info is None or not _same(stored.load(name), job.checkpoint.load(name)):
            yield f"{name} is not the source's"


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same values; a GGUF file may store them in a wider type."""
    if one.is_floating_point() and other.is_floating_point():
        one, other = one.float(), other.float()
    return one.dtype == other.dtype and torch.equal(one, other)
