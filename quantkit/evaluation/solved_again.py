"""Solve blocks of a finished output again from its source, and compare them with the stored ones.

The loop runs as in a resumed job that has staged all blocks but those to be solved: these others are read
from the output. On the machine of the job, with its versions, all values must be equal. Elsewhere sums round
differently, and error feedback turns many codes over. Then the stored linears run as well, so that each is
judged alone: it may lose LINEAR_BOUND more than the one solved again, and a row ROW_BOUND. Noise may also
reverse the move of a target (`retarget`), which adds up to MOVE_BOUND times the loss of the move. The
measurements from which the bounds follow are in docs/verify.md.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import UNSUPPORTED, USAGE, VERIFICATION, count, name_all, require
from quantkit.grids.grid import QuantizedWeight
from quantkit.inspection.names import split
from quantkit.layouts import LinearSpec, Statistic
from quantkit.layouts.ggml.blocks import decode_rows, row_bytes
from quantkit.models.files import reading
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import watched
from quantkit.models.gguf.checkpoint import GgmlTensor, GgufCheckpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate.sites import Block
from quantkit.quantize.calibrate.statistics import SiteStatistics
from quantkit.quantize.calibrate.view import BlockView, Transformed
from quantkit.quantize.job import Job
from quantkit.quantize.loop import Loop
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers import Solved, Solver, row_losses
from quantkit.quantize.solving import Quantizer
from quantkit.quantize.transforms.fold import Fold, Producer
from quantkit.quantize.transforms.scaling import ColumnScaling, Losses

LINEAR_BOUND, ROW_BOUND, MOVE_BOUND = 0.05, 2.0, 4.0  # in losses of a linear solved again, and of its move
COUPLED_BOUND = 4.0  # of a row, where a solver lets rows compensate for each other
SCALE_BOUND = 0.01  # relative: a scaled vector in bfloat16 turns over by 1/128
DIGIT = 0.02  # relative, of outputs: rounded more finely, they tell all digits of a scale in bfloat16
NORM_NOISE = 1e-5  # relative, of the scale by which a stored norm was divided


def compare(
    job: Job, stored: Checkpoint, blocks: int | None, seed: int, exact: bool, progress: Progress
) -> dict[str, Any]:
    """Solve blocks again, and compare these and the tensors that the job copies with the stored ones."""
    solved = [spec for spec in job.specs if spec.grid]
    what = f"{stored.source} was encoded tensor by tensor, not block by block"
    require(solved, what, "make it again with the same options, and compare the files", UNSUPPORTED)
    names = {spec.name for spec in solved}
    skeleton = Skeleton(stored, job.skeleton.dtype, job.skeleton.device)
    stored = skeleton.checkpoint  # with single experts
    if isinstance(stored, GgufCheckpoint):  # its names may differ from the source's
        ours, theirs = job.skeleton.names.stored, skeleton.names.stored
        named = {there: ours[name] for name, there in theirs.items() if name in ours}
        infos = {named.get(name, name): info for name, info in stored.infos.items()}
        stored = replace(stored, infos={name: replace(info, name=name) for name, info in infos.items()})
        stored = stored.coded(names)
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


class Steps(Progress):
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
        super().__init__(job, Steps(progress))
        self.method = replace(job.method, solver=_Remembering(job.method.solver))
        self.quantizer = partial(_Comparing, stored=stored, rows=self.rows, exact=exact)

    def _done(self) -> list[bool]:
        return [index not in self.chosen for index in range(len(self.skeleton.blocks))]

    def _written(self, index: int) -> Checkpoint:
        return self.stored

    def _block(self, index: int, module: nn.Module) -> Block:
        block, transform = super()._block(index, module), self.job.method.transform
        if transform and not self.exact:
            scale = partial(self._scale, block, transform)
            self.method = replace(self.method, transform=_with(transform, _scale=scale))
        return block

    def _scale(
        self, block: Block, transform: ColumnScaling, view: BlockView, fold: Fold, result: Transformed
    ) -> dict[str, Tensor]:
        """Scale a fold as the stored one: elsewhere a search may end at another scale of equal worth."""
        name = fold.producer.name
        stored = self.stored.read(self.skeleton.names.stored_of(block.index, f"{name}.weight"))
        hessians = (given.hessian for site, given in result.statistics.items() if name in site.linears)
        weight = view.block.get_submodule(name).weight.float()
        there, noise = _scale_of(fold.producer, weight, stored.to(weight), next(hessians, None))

        def search(losses: Losses, *given: Any) -> Tensor | None:
            tried, watched = [torch.ones_like(there)], copy(losses)

            def of(scale: Tensor, limit: float = math.inf) -> float:
                tried.append(scale)
                return losses.of(scale, limit)

            watched.of = of
            searched = transform.search(watched, *given)
            tried += [] if searched is None else [searched]
            distances = [(there / each).log().abs() for each in tried]
            near = min(range(len(tried)), key=lambda k: distances[k].mean())
            scale = torch.where(distances[near] <= noise, tried[near], there)
            return None if bool((scale == 1).all()) else scale

        enough = dict.fromkeys(transform.enough, math.inf)
        return _with(transform, search=search, enough=enough)._scale(view, fold, result)


def _with(transform: ColumnScaling, **attributes: Any) -> ColumnScaling:
    """Return a copy of a transform with other attributes or methods."""
    changed = copy(transform)
    vars(changed).update(attributes)
    return changed


def _scale_of(
    producer: Producer, weight: Tensor, stored: Tensor, hessian: Tensor | None
) -> tuple[Tensor, Tensor | float]:
    """Return the scale `[in]` by which a producer's weight was divided before it was stored, and its relative
    uncertainty. The scale of a linear, in few digits, is the one that explains the outputs of its rows best.
    It is as uncertain as these are rounded; if they are rounded finely, all digits are certain."""
    if weight.ndim == 1:
        scale, noise = (weight + float(producer.one_plus)) / (stored + float(producer.one_plus)), NORM_NOISE
    else:
        pairs = (weight, weight), (weight, stored), (stored, stored)
        own, both, other = ((a if hessian is None else a @ hessian).mul(b).sum(1) for a, b in pairs)
        scale = (own / both).bfloat16().float()
        missed = (1 - both * both / (own * other)).nan_to_num(0).clamp(min=0).sqrt()  # share of the outputs
        noise = missed[producer.rows] if missed.mean() > DIGIT else 0.0
    return torch.where(scale.isfinite() & (scale > 0), scale, 1.0)[producer.rows], noise


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
        info, packed = coded[name], reading.tensor(rows)
        what = f"{stored.source} stores {name} in {info.dtype}, which is not the type of its job"
        known = packed.shape[-1] == row_bytes(info.dtype, info.shape[1])
        require(known, what, "the file was changed, or another job made it", VERIFICATION)
        values = decode_rows(info.dtype, packed, info.shape[1])
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
    """Yield problems of other tensors: neither the source's nor scaled as when blocks were solved again."""
    suffixes, rest = job.method.layout.suffixes, job.staging.rest()
    packed = {f"{spec.name}.{part}" for spec in job.specs if spec.grid for part in suffixes}
    scaled = {name: info for index in chosen for name, info in job.staging.infos(index).items()}
    beside = {split(name)[2] for name in scaled.keys() - packed}
    known = {*job.checkpoint.names, *(f"{spec.name}.weight" for spec in job.specs)}
    known |= {block + local for block in job.skeleton.names.stored_blocks for local in beside}
    if added := sorted(Counter(stored.names) - Counter(known)):  # also weights beside their codes
        yield f"tensors were added, which neither the source nor the job has: {name_all(added, 3)}"
    for name in sorted(name for name in scaled if name not in packed or ".input_" in name):
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
