"""Turn a request into a job: open, resolve and check everything before weights are loaded."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError, count, name_all, refusal, require
from quantkit.layouts import LinearSpec, Statistic
from quantkit.models.files import gguf_shards
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import watched
from quantkit.models.machine import distributed
from quantkit.models.machine.device import choose_device, choose_dtype
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.linears import kept_parameters
from quantkit.options import SHARD_GB, RunOptions
from quantkit.quantize.calibrate import cache_peaks
from quantkit.quantize.methods import BuiltMethod
from quantkit.quantize.outputs import Material
from quantkit.quantize.prepare import finished, linears, plan
from quantkit.quantize.prepare.memory import loss_tokens
from quantkit.quantize.prepare.plan import JobPlan
from quantkit.quantize.prepare.request import Request
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import may_replace
from quantkit.quantize.staging.fingerprint import check_equal, versions
from quantkit.quantize.staging.folder import Staging
from quantkit.text import calibration
from quantkit.text.calibration import CalibrationSet, HeldBack

HASHED_AT_ONCE = 64 << 20  # bytes: a larger source is hashed while its job runs
ALONE = "start it without torchrun; several processes serve eval, imatrix, and methods that calibrate"
DATA_FREE_TOKENS = 2  # a data-free job is verified with: the least that gives attention a choice


@dataclass(frozen=True)
class Job:
    """A checked job. batches: token ids `[batch, tokens]` of this rank, out of batch_count; a data-free job
    has one batch, to verify the output. held_back: tokens on which the loss is measured; None: it is not.

    source_sha256 may arrive last; until then the fingerprint has None in its place.
    """

    request: Request
    checkpoint: Checkpoint
    method: BuiltMethod
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
        return {} if self.staging.one_file else self.material.modules

    @property
    def refused(self) -> dict | None:
        """The JSON object of the error that prevents writing the output, or None."""
        return refusal(lambda: self.staging.check(self.request.resume, self.request.overwrite))

    @property
    def material(self) -> Material:
        """The source and the staged linears that make up the output."""
        shard_gb = self.request.run.max_shard_gb or (None if self.staging.one_file else SHARD_GB)
        shard_bytes = shard_gb and int(shard_gb * 1e9)
        return Material(self.skeleton, self.specs, self.method.layout, self.staging, shard_bytes)


def prepare_all(request: Request, progress: Progress, dry_run: bool = False) -> tuple[list[Path], list[Job]]:
    """Return a command's outputs and a job for each; with `resume`, only unfinished jobs. See `prepare`."""
    requests = [linears.settled(single) for single in request.each()]
    outputs = [single.destination for single in requests]
    if request.resume:
        left = [single for single in requests if not finished.is_made(single)]
        requests = left or (requests if request.overwrite else [])
    elif len(requests) > 1 and not request.overwrite and not dry_run:
        may_replace.check_new(outputs)
    jobs: list[Job] = []
    for single in requests:
        jobs.append(prepare(single, progress, dry_run, jobs[0] if jobs else None))
    return [gguf_shards.first(output) for output in outputs], jobs


def prepare(request: Request, progress: Progress, dry_run: bool = False, first: Job | None = None) -> Job:
    """Open, resolve and check a job. Raises QuantkitError naming everything that would fail later.

    dry_run: skip the checks of the output path and the source's sha256. first: the same command's first job,
    so that the source is hashed and the text read once.
    """
    request.method.check()
    request.run.check()
    checkpoint = _open_source(request, progress)
    request = linears.settled(request, checkpoint)
    staging = request.staging
    may_replace.check_source(staging.output, checkpoint.folder)
    staged = distributed.broadcast(staging.stored_fingerprint) if request.resume else None
    adopted = staged["execution"] if staged else {}
    skeleton = open_skeleton(checkpoint, request.run, adopted)
    method, specs = linears.of_job(skeleton, request)
    _check_ranks(method)
    if Statistic.CACHE in method.needs:
        cache_peaks.check(skeleton.blocks)
    if not dry_run:  # after errors in options have been reported
        staging.check(request.resume, request.overwrite)
    if request.resume and not staged:
        progress.phase(f"no unfinished job for {staging.output}: starting at the first block")
    if first:
        source_sha256 = first.source_sha256
    else:
        source_sha256 = Future() if dry_run or distributed.rank() else _hashed(checkpoint)

    if method.outside and Statistic.HESSIAN in method.needs:
        rounded = method.output.rounded(skeleton.checkpoint)
        if rounded is not skeleton.checkpoint:
            dtype = {"dtype": str(skeleton.dtype).removeprefix("torch.")}
            skeleton = open_skeleton(rounded, request.run, adopted | dtype)
    checkpoint = skeleton.checkpoint
    for warning in filter(None, _warnings(request, skeleton, method, specs, staging.one_file)):
        progress.warn(warning)

    if (text := request.calibration.calibration) and not method.needs:
        progress.phase(f"not reading {text}: with these options {method.name} needs no text")
    vocabulary = checkpoint.text_config.vocab_size
    loss_size = loss_tokens(request.run.loss_tokens, bool(method.needs), vocabulary)
    calibrated = None
    if method.needs:
        known = first.calibration if first else None
        calibrated = known or calibrate(checkpoint, request, progress, loss_size)
    tokens = calibrated.tokens if calibrated else _verification_tokens(checkpoint)
    held_back = None
    if loss_size and not dry_run:  # before memory is planned: a tokenizer may take 0.5 GB
        held_back = calibrated.held_back if calibrated else None
        held_back = _held_back(checkpoint, held_back, loss_size, request.run.loss_tokens, progress)
    predicted = 4 * loss_size * vocabulary  # bytes of the original's predictions
    job_plan = plan.decide(skeleton, specs, method, request.run, tokens.shape, adopted, predicted)
    batch_size, fingerprint = job_plan.execution.batch_size, {}
    if not dry_run:
        distributed.broadcast(lambda: plan.check_disk(staging.output.absolute(), job_plan.disk_bytes))
        if distributed.rank() == 0 and (staged or job_plan.source_bytes < HASHED_AT_ONCE):
            if not first:
                progress.phase("hashing the source")
            source_sha256.result()
        fingerprint = _fingerprint(request, source_sha256, calibrated, job_plan)
        fingerprint |= {"experts": request.run.experts} if skeleton.is_mixture else {}
        check_equal(fingerprint)
    batches = list(distributed.share(tokens.split(batch_size))) if method.needs else [tokens]
    return Job(
        request, checkpoint, method, skeleton, specs, job_plan, calibrated, batches, staging, fingerprint,
        source_sha256, -(-len(tokens) // batch_size), held_back,
    )  # fmt: skip


def _open_source(request: Request, progress: Progress) -> Checkpoint:
    """Open the source. Raises QuantkitError if it is already quantized, unless --allow-requantize is set."""
    checkpoint = request.open()
    for note in checkpoint.notes:
        progress.warn(note)
    if not checkpoint.quantized:
        return checkpoint
    what = f"{request.source} is quantized already"
    hint = "start from the original checkpoint: quantizing twice adds the errors of both "
    hint += "(--allow-requantize quantizes it anyway)"
    require(request.run.allow_requantize, what, hint, UNSUPPORTED)
    progress.warn(f"{what}: the errors of both quantizations add up")
    return checkpoint


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


def execution_of(skeleton: Skeleton, batches: Sequence[Tensor]) -> dict[str, Any]:
    """Return how a model runs on batches of token ids, for JSON."""
    return {
        "dtype": str(skeleton.dtype).removeprefix("torch."),
        "device": str(skeleton.device),
        "batch_size": len(batches[0]),
        "threads": torch.get_num_threads(),
    }


def _check_ranks(method: BuiltMethod) -> None:
    """Raise QuantkitError for a job that several processes cannot share."""
    if distributed.count() == 1:
        return
    what = f"{method.name} without calibration has nothing that {distributed.count()} processes could share"
    require(method.needs, what, ALONE, UNSUPPORTED)
    if Statistic.CURVATURE in method.needs:
        message = f"--solver yaqa does not run as several processes, but {distributed.count()} were started"
        raise QuantkitError(message, "use --solver gptq, or start it without torchrun", UNSUPPORTED)


def _warnings(
    request: Request, skeleton: Skeleton, method: BuiltMethod, specs: list[LinearSpec], one_file: bool
) -> Iterator[str]:
    """Yield warnings about the output. Raises QuantkitError for unread experts without --allow-unread."""
    yield from method.notes
    if not one_file:
        yield method.output.growth(skeleton.checkpoint, specs)
    if not request.run.allow_unread:
        yield linears.refuse_unread_experts(skeleton, specs, method.layout)
    if method.layout.fused and (split := linears.split_fusions(specs)):
        yield (
            f"linears that engines such as vLLM fuse are quantized differently: {name_all(split)}; "
            "quantkit inspect lists the clients that load it"
        )


def calibrate(
    checkpoint: Checkpoint, request: Request, progress: Progress, held_back: int = 0
) -> CalibrationSet:
    """Return the requested calibration text as tokens. held_back: how many more to hold back."""
    progress.phase("reading the calibration text")
    calibrated = calibration.load(checkpoint, request.calibration, request.offline, held_back)
    if calibrated.warning:
        progress.warn(calibrated.warning)
    return calibrated


def _held_back(
    checkpoint: Checkpoint, held_back: HeldBack | None, loss_size: int, asked: int | None, progress: Progress
) -> HeldBack | None:
    """Return the tokens on which the loss is measured: of the calibration text if it has some left, else of
    the shipped text. Warns if they are much fewer than `asked`."""
    held_back = held_back or calibration.shipped_held_out(checkpoint, loss_size, progress.warn)
    measured = held_back.tokens.numel() if held_back else 0
    if asked and measured <= asked - calibration.HELD_BACK:
        progress.warn(f"--loss-tokens {asked}: the loss is measured on {count(measured, 'token')} only")
    return held_back


def _verification_tokens(checkpoint: Checkpoint) -> Tensor:
    """Return one sequence of seeded random ids, by which a data-free job verifies its output."""
    length = min(DATA_FREE_TOKENS, checkpoint.context or DATA_FREE_TOKENS)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(checkpoint.text_config.vocab_size, (1, length), generator=generator)


def _hashed(checkpoint: Checkpoint) -> Future[str]:
    """Return the source's sha256, computed in a daemon thread. The result raises QuantkitError if the source
    changed since it was opened."""
    sha256: Future[str] = Future()

    def run() -> None:
        try:
            with watched(checkpoint):
                result = checkpoint.sha256()
            sha256.set_result(result)  # only of a source that did not change meanwhile
        except BaseException as error:
            sha256.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return sha256


def _fingerprint(
    request: Request, source_sha256: Future[str], calibrated: CalibrationSet | None, job_plan: JobPlan
) -> dict:
    """Return everything that affects the output's bytes. Only a job with an equal fingerprint resumes."""
    run = request.run
    return {
        **versions(),
        "source_sha256": source_sha256.result() if source_sha256.done() else None,
        "method": request.method.name,
        "options": request.method.record(),
        "exclude": list(run.exclude),
        "override": list(run.override),
        "allow_requantize": run.allow_requantize,
        "max_shard_gb": run.max_shard_gb,
        "calibration": calibrated.record() if calibrated else None,
        "execution": job_plan.execution.decisive(),
    }
