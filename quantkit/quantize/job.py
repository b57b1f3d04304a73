"""Turn a request into a job: open, resolve and check everything before weights are loaded."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from quantkit import __version__
from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, name_all, require
from quantkit.layouts import LinearSpec, Statistic
from quantkit.models.files import gguf_shards
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint, watched
from quantkit.models.machine import distributed
from quantkit.models.machine.device import choose_device, choose_dtype
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.linears import kept_parameters
from quantkit.options import SHARD_GB, CalibrationOptions, RunOptions, check_value, flag_of, size_bytes
from quantkit.quantize import methods
from quantkit.quantize.methods import Method
from quantkit.quantize.outputs import Material
from quantkit.quantize.prepare import linears, names, plan
from quantkit.quantize.prepare.memory import loss_tokens
from quantkit.quantize.prepare.plan import JobPlan
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import may_replace
from quantkit.quantize.staging.fingerprint import check_equal
from quantkit.quantize.staging.folder import Staging
from quantkit.text import calibration
from quantkit.text.calibration import CalibrationSet, HeldBack

HASHED_AT_ONCE = 64 << 20  # bytes: a larger source is hashed while its job runs
ALONE = "start it without torchrun; several processes serve eval, imatrix, and methods that calibrate"
DATA_FREE_TOKENS = 2  # a data-free job is verified with: the least that gives attention a choice


@dataclass(frozen=True)
class Request:
    """A job as the user typed it."""

    source: str
    method: str
    options: Any  # the method's Options
    calibration: CalibrationOptions
    run: RunOptions
    output: Path | None = None
    revision: str | None = None
    offline: bool = False
    trust_remote_code: bool = False
    resume: bool = False
    overwrite: bool = False
    open_groups: bool = False  # no group size was typed: linears that it does not divide stay in 16 bit


@dataclass(frozen=True)
class Job:
    """A checked job. batches: token ids `[batch, tokens]` of this rank, out of batch_count; a data-free job
    has one batch, to verify the output. held_back: tokens on which the loss is measured; None: it is not.

    source_sha256 may arrive last; until then the fingerprint has None in its place.
    """

    request: Request
    checkpoint: Checkpoint
    method: Method
    skeleton: Skeleton
    specs: list[LinearSpec]
    plan: JobPlan
    calibration: CalibrationSet | None
    batches: list[Tensor]
    staging: Staging
    fingerprint: dict
    source_sha256: Future[str]
    batch_count: int
    held_back: HeldBack | None

    @property
    def identity(self) -> dict:
        """The fingerprint with the source's sha256; waits for the sha256."""
        return self.fingerprint | {"source_sha256": self.source_sha256.result()}

    @property
    def kept_parameters(self) -> list[dict]:
        """Matrices in blocks that are not linears."""
        return kept_parameters(self.skeleton)

    @property
    def copied(self) -> dict[str, int]:
        """Bytes of each module outside the language model that is copied."""
        return self.method.output.copied(self.material)

    @property
    def refusal(self) -> QuantkitError | None:
        """The error that prevents writing the output, or None; a dry run only reports it."""
        try:
            self.staging.check(self.request.resume, self.request.overwrite)
        except QuantkitError as error:
            return error
        return None

    @property
    def material(self) -> Material:
        """The source and the staged linears that make up the output."""
        shard_gb = self.request.run.max_shard_gb or (None if self.staging.one_file else SHARD_GB)
        shard_bytes, errors = shard_gb and int(shard_gb * 1e9), Statistic.HESSIAN in self.method.needs
        return Material(self.skeleton, self.specs, self.method.layout, self.staging, shard_bytes, errors)


def prepare(
    request: Request, progress: Progress, dry_run: bool = False, source_sha256: Future[str] | None = None
) -> Job:
    """Open, resolve and check a job. Raises QuantkitError naming everything that would fail later.

    dry_run: skip the checks of the output path and the source's sha256. source_sha256: from another job with
    the same source, so that the source is hashed once.
    """
    methods.check(request.method, request.options)
    check_run(request.run)
    checkpoint = _open(request, progress)
    request = settled(request, checkpoint)
    staging = staging_of(request)
    may_replace.check_source(staging.output, checkpoint.folder)
    staged = distributed.broadcast(staging.stored_fingerprint) if request.resume else None
    adopted = staged["execution"] if staged else {}
    skeleton = open_skeleton(checkpoint, request.run, adopted)
    method, specs = _resolve(skeleton, request)
    if not dry_run:  # after errors in options have been reported
        staging.check(request.resume, request.overwrite)
    if request.resume and not staged:
        progress.phase(f"no unfinished job for {staging.output}: starting at the first block")
    shared = source_sha256 is not None
    if source_sha256 is None:
        source_sha256 = Future() if dry_run or distributed.rank() else _begin(partial(_hash, checkpoint))

    checkpoint = skeleton.checkpoint
    if method.outside and Statistic.HESSIAN in method.needs:
        checkpoint = method.output.rounded(checkpoint, specs)
    if checkpoint is not skeleton.checkpoint:
        dtype = {"dtype": str(skeleton.dtype).removeprefix("torch.")}
        skeleton = open_skeleton(checkpoint, request.run, adopted | dtype)
    growth = "" if staging.one_file else method.output.growth(checkpoint, specs)
    for note in filter(None, (*method.notes, growth)):
        progress.warn(note)
    if not request.run.allow_unread and (
        note := linears.refuse_unread_experts(skeleton, specs, method.layout)
    ):
        progress.warn(note)
    if method.layout.fused and (split := linears.split_fusions(specs)):
        progress.warn(
            f"linears that engines such as vLLM fuse are quantized differently: {name_all(split)}; "
            "quantkit inspect lists the clients that load it"
        )
    vocabulary = checkpoint.text_config.vocab_size
    wanted = loss_tokens(request.run.loss_tokens, bool(method.needs), vocabulary)
    calibrated = calibrate(checkpoint, request, progress, wanted) if method.needs else None
    tokens = calibrated.tokens if calibrated else _verification_tokens(checkpoint)
    planned = skeleton, specs, method, request.run, tokens.shape, adopted, 4 * wanted * vocabulary
    job_plan = plan.decide(*planned)
    execution = job_plan.execution
    fingerprint = {}
    if not dry_run:
        distributed.broadcast(lambda: plan.check_disk(staging.output.absolute(), job_plan.disk_bytes))
        if distributed.rank() == 0 and (staged or job_plan.source_bytes < HASHED_AT_ONCE):
            if not shared:
                progress.phase("hashing the source")
            source_sha256.result()
        known = source_sha256.result() if source_sha256.done() else None
        fingerprint = _fingerprint(request, known, calibrated, job_plan, skeleton.is_mixture)
        check_equal(fingerprint)
    batches = plan.own_batches(tokens, execution.batch_size) if method.needs else [tokens]
    batch_count = -(-len(tokens) // execution.batch_size)
    return Job(
        request, checkpoint, method, skeleton, specs, job_plan, calibrated, batches, staging, fingerprint,
        source_sha256, batch_count, _held_back(checkpoint, calibrated, 0 if dry_run else wanted),
    )  # fmt: skip


def settled(request: Request, checkpoint: Checkpoint | None = None) -> Request:
    """Return the request with the group size for its model, if the user left it open. The output's name and
    the job's identity contain it."""
    if not methods.has_open_groups(request.options):
        return request
    named = request.source, request.revision, request.offline, request.trust_remote_code
    skeleton = Skeleton(checkpoint or open_checkpoint(*named), torch.float32, torch.device("cpu"))
    if request.options.head:
        skeleton.add_head()
    options = linears.fitted(skeleton, request.options, request.run.exclude, request.run.override)
    return replace(request, options=options, open_groups=True)


def _held_back(checkpoint: Checkpoint, calibrated: CalibrationSet | None, wanted: int) -> HeldBack | None:
    """Return the tokens to measure the loss on: of the calibration text, else of the shipped text."""
    own = calibrated and calibrated.held_back
    return own or (calibration.shipped_held_out(checkpoint, wanted) if wanted else None)


def _open(request: Request, progress: Progress) -> Checkpoint:
    """Open the source. Raises QuantkitError if it is already quantized, unless --allow-requantize is set."""
    checkpoint = open_checkpoint(request.source, request.revision, request.offline, request.trust_remote_code)
    for note in checkpoint.notes:
        progress.warn(note)
    if not checkpoint.quantized:
        return checkpoint
    if not request.run.allow_requantize:
        raise QuantkitError(
            f"{request.source} is quantized already",
            hint="start from the original checkpoint: quantizing twice adds the errors of both "
            "(--allow-requantize quantizes it anyway)",
            exit_code=UNSUPPORTED,
        )
    progress.warn(f"{request.source} is quantized already: the errors of both quantizations add up")
    return checkpoint


def staging_of(request: Request) -> Staging:
    """Return the staging folder of the job; only rank 0 writes to it."""
    one_file = methods.load(request.method).suffix(request.options).endswith(".gguf")
    output, sharded = output_of(request), request.run.max_shard_gb
    odd = one_file and (gguf_shards.whole(output) != output or (sharded and output.suffix != ".gguf"))
    require(not odd, f"--output {output} is no name for shards", "give one such as model.gguf", USAGE)
    return Staging(output, one_file, follows=distributed.rank() > 0)


def check_run(run: RunOptions) -> None:
    """Raise QuantkitError for invalid run options."""
    for name in ("batch_size", "threads"):
        value = getattr(run, name)
        check_value(flag_of(name), value, value is None or value >= 1, "choose 1 or more")
    tokens = run.loss_tokens
    check_value("--loss-tokens", tokens, tokens in (None, 0) or tokens >= 16, "choose 0, or 16 or more")
    if run.max_memory is not None:
        size_bytes(run.max_memory, "--max-memory")
    shard = run.max_shard_gb
    fits = shard is None or 0 < shard < math.inf
    check_value("--max-shard-gb", shard, fits, "choose a positive size, such as 5")


def open_skeleton(checkpoint: Checkpoint, run: RunOptions, adopted: dict | None = None) -> Skeleton:
    """Return the skeleton of a complete model on the requested device and in the requested precision.

    adopted: the resumed job's execution, used for options that `run` leaves open. Also sets torch's threads.
    """
    adopted = adopted or {}
    device = choose_device(adopted.get("device", "auto") if run.device == "auto" else run.device)
    torch.set_num_threads(run.threads or adopted.get("threads") or torch.get_num_threads())
    choice = run.dtype if run.dtype != "auto" else adopted.get("dtype", "auto")
    dtypes = [info.dtype for info in checkpoint.infos.values() if len(info.shape) == 2]
    common = max(set(dtypes), key=dtypes.count) if dtypes else "F32"
    skeleton = Skeleton(checkpoint, getattr(torch, choose_dtype(choice, common, device)), device)
    skeleton.names.check_complete()
    skeleton.streams = any(distributed.all_gather(skeleton.streams))
    return skeleton


def calibrate(
    checkpoint: Checkpoint, request: Request, progress: Progress, held_back: int = 0
) -> CalibrationSet:
    """Return the requested calibration text as tokens. held_back: how many more to hold back."""
    progress.phase("reading the calibration text")
    calibrated = calibration.load(checkpoint, request.calibration, request.offline, held_back)
    if calibrated.warning:
        progress.warn(calibrated.warning)
    return calibrated


def _resolve(skeleton: Skeleton, request: Request) -> tuple[Method, list[LinearSpec]]:
    """Return the method, and every linear with its grid."""
    run = request.run
    text = request.calibration.calibration is not None
    method = methods.build(request.method, request.options, text, skeleton)
    _check_ranks(method)
    override = run.override
    if head := getattr(request.options, "head", 0):
        override = (f"^{skeleton.add_head()}$={head}", *override)
    chosen = run.exclude, override, request.open_groups
    specs = linears.resolve(skeleton, method.make_grid, method.layout, *chosen)
    if bits := getattr(request.options, "embedding", 0):
        specs.append(linears.embedding(skeleton, method.make_grid, method.layout, bits))
    outside = set(skeleton.checkpoint.packed) - {row.name for row in specs}
    what = f"modules besides the blocks' linears are quantized: {name_all(sorted(outside))}"
    require(not outside, what, "start from the original checkpoint", UNSUPPORTED)
    what, hint = f"no linear can be quantized: {specs[0].kept}", "choose --group-size 16 or 8, or -1"
    if run.exclude:
        what, hint = "--exclude leaves nothing to quantize", "narrow the pattern"
    require(not all(row.kept for row in specs), what, hint, USAGE)
    notes = linears.group_notes(specs, request.options.group_size) if request.open_groups else ()
    return replace(method, layout=method.layout.of_job(specs), notes=(*method.notes, *notes)), specs


def _check_ranks(method: Method) -> None:
    """Raise QuantkitError for a job that several processes cannot share."""
    if distributed.count() == 1:
        return
    what = f"{method.name} without calibration has nothing that {distributed.count()} processes could share"
    require(method.needs, what, ALONE, UNSUPPORTED)
    if Statistic.CURVATURE in method.needs:
        message = f"--solver yaqa does not run as several processes, but {distributed.count()} were started"
        raise QuantkitError(message, "use --solver gptq, or start it without torchrun", UNSUPPORTED)


def output_of(request: Request) -> Path:
    """Return the output path: as requested, or derived from source and options."""
    named = request.source, request.method, request.options, request.run.override
    return request.output or names.derived(*named)


def _verification_tokens(checkpoint: Checkpoint) -> Tensor:
    """Return one sequence of seeded random ids, by which a data-free job verifies its output."""
    length = min(DATA_FREE_TOKENS, checkpoint.context or DATA_FREE_TOKENS)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(checkpoint.text_config.vocab_size, (1, length), generator=generator)


def _hash(checkpoint: Checkpoint) -> str:
    """Return the source's sha256. Raises QuantkitError if the source changed since it was opened."""
    with watched(checkpoint):
        return checkpoint.sha256()


def _begin(work: Callable[[], str]) -> Future[str]:
    """Run `work` in a daemon thread and return its future result."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _fingerprint(
    request: Request,
    source_sha256: str | None,
    calibrated: CalibrationSet | None,
    job_plan: JobPlan,
    mixture: bool,
) -> dict:
    """Return everything that affects the output's bytes. Only a job with an equal fingerprint resumes."""
    run = request.run
    found = {
        "quantkit": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "source_sha256": source_sha256,
        "method": request.method,
        "options": methods.record(request.method, request.options),
        "exclude": list(run.exclude),
        "override": list(run.override),
        "allow_requantize": run.allow_requantize,
        "max_shard_gb": run.max_shard_gb,
        "calibration": calibrated.record() if calibrated else None,
        "execution": job_plan.execution.decisive(),
    }
    return found | ({"experts": run.experts} if mixture else {})
