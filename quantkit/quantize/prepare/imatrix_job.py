"""`quantkit imatrix`: turn options into an importance matrix for llama-quantize and quantkit."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError, refusal, require
from quantkit.models.files import card
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.gguf_shards import base_name
from quantkit.models.files.open import watched
from quantkit.models.gguf import imatrix, tensors
from quantkit.models.machine import distributed
from quantkit.models.machine.device import is_accelerator
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.linears import linears
from quantkit.quantize.calibrate import importance
from quantkit.quantize.calibrate.importance import Importance
from quantkit.quantize.calibrate.states import Place
from quantkit.quantize.job import calibrate, execution_of, open_skeleton
from quantkit.quantize.prepare import plan
from quantkit.quantize.prepare.memory import COMFORT, Peak, forward_memory
from quantkit.quantize.prepare.request import Request
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import may_replace
from quantkit.quantize.staging.folder import disk_errors
from quantkit.quantize.timings import Timings
from quantkit.text.calibration import CalibrationSet


@dataclass(frozen=True)
class ImatrixJob:
    """A checked job. names: stored name of a linear -> name of its weight in a GGUF file. place: where hidden
    states are kept; None: in memory. refused: JSON object of the error that prevents writing the output."""

    checkpoint: Checkpoint
    skeleton: Skeleton
    names: dict[str, str]
    calibration: CalibrationSet
    batches: list[Tensor]
    memory_bytes: int
    output: Path
    place: Place | None
    refused: dict | None

    def record(self) -> dict:
        """Return the `quantkit.imatrix/1` JSON; `run` adds `seconds`."""
        return {
            "schema": "quantkit.imatrix/1",
            "source": self.checkpoint.source,
            "output": str(self.output),
            "matrices": len(set(self.names.values())),
            **({"ranks": distributed.count()} if distributed.count() > 1 else {}),
            "calibration": self.calibration.record(),
            "memory_bytes": self.memory_bytes,
            "execution": execution_of(self.skeleton, self.batches),
        }


def prepare(request: Request, progress: Progress, dry_run: bool = False) -> ImatrixJob:
    """Open, resolve and check a job. Of `request.run`, only options of a forward pass are used.

    Raises QuantkitError for all that would fail later; a dry run only reports a refused output.
    """
    request.run.check()
    checkpoint = request.open()
    output = request.output or Path(f"{base_name(request.source)}.imatrix.gguf")
    check = partial(_check_output, output, checkpoint, request.overwrite)
    refused = distributed.broadcast(lambda: refusal(check))
    if refused and not dry_run:
        raise QuantkitError(**refused)
    hint = "an importance matrix is made from the original checkpoint: give that one"
    require(not checkpoint.quantized, f"{request.source} is quantized already", hint, UNSUPPORTED)
    skeleton = open_skeleton(checkpoint, request.run)
    targets = tensors.of_checkpoint(skeleton.checkpoint)  # which has experts one by one
    stored = {name: target.name for target in targets for name in target.stored if target.part is None}
    rows = linears(skeleton)
    calibrated = calibrate(checkpoint, request, progress)
    tokens = calibrated.tokens
    batch_size = plan.sequences_at_once(request.run.batch_size, tokens.shape, skeleton)
    batches = list(distributed.share(tokens.split(batch_size)))
    tokens = torch.cat(batches)
    shapes = plan.shapes_of(skeleton, rows, tokens.numel(), batches[0].numel())
    free = plan.FreeMemory.of(skeleton.device, request.run.max_memory)
    need, place = forward_memory(shapes), None
    if need > COMFORT * free.computing and not is_accelerator(skeleton.device):
        need = forward_memory(shapes, spilled=True)
        place = Place("disk", output.absolute().parent)
    peak = Peak(need, 0) if is_accelerator(skeleton.device) else Peak(0, need)
    free.check(peak, "fewer --samples, shorter --seqlen or a smaller --batch-size")
    if place:
        progress.warn("hidden states do not fit into memory: a file next to the output keeps them")
    names = {row.name: stored[f"{row.name}.weight"] for row in rows if f"{row.name}.weight" in stored}
    return ImatrixJob(checkpoint, skeleton, names, calibrated, batches, need, output, place, refused)


def _check_output(output: Path, checkpoint: Checkpoint, overwrite: bool) -> None:
    may_replace.check_place(output)
    for path in {info.file for info in checkpoint.infos.values()}:
        may_replace.check_source(output, path)
    may_replace.check(output, True, overwrite)


def run(job: ImatrixJob, progress: Progress) -> dict:
    """Measure and write the importance matrix, completely or not at all; return the job's JSON."""
    timings = Timings(job.skeleton.device)
    with watched(job.checkpoint):
        gathered = importance.gather(job.skeleton, job.batches, progress, timings, job.place)
    distributed.broadcast(lambda: _write(job, gathered, timings))
    return job.record() | {"seconds": timings.seconds}


def _write(job: ImatrixJob, gathered: Importance, timings: Timings) -> None:
    folder = job.output.absolute().parent
    with disk_errors(folder, "run the same command again"), timings("write"):
        folder.mkdir(parents=True, exist_ok=True)
        imatrix.write(job.output, importance.as_imatrix(gathered, job.names, job.calibration))
        if card.is_free(path := card.path_of(job.output)):
            path.unlink(missing_ok=True)  # the card of a model that was replaced
