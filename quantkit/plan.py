"""The job before it runs: what it takes in memory and disk, decided and checked on shapes alone."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from quantkit import processor
from quantkit.capacity.job import BATCH_TOKENS, TABLES, Shapes, peak_memory
from quantkit.checkpoint import Checkpoint
from quantkit.errors import RESOURCES, UNSUPPORTED, QuantkitError
from quantkit.methods import Method
from quantkit.options import RunOptions
from quantkit.skeleton import Skeleton
from quantkit.spec import LinearSpec

GIB = 1 << 30
ENCODING = 1 << 24  # temporaries of an encoder


@dataclass(frozen=True)
class Execution:
    """How the job runs; every field decides bytes of the output, so all stand in the fingerprint."""

    dtype: str
    device: str
    batch_size: int
    sequential: str
    threads: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


@dataclass(frozen=True)
class JobPlan:
    """Predicted peaks in bytes, above what the interpreter itself takes, and the size of the output."""

    execution: Execution
    memory_bytes: int
    disk_bytes: int
    output_bytes: int
    source_bytes: int
    bits_per_weight: float


def choose_device(asked: str) -> torch.device:
    """`auto` is cuda where there is one. Raises QuantkitError for a device that is not there."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise QuantkitError(
            f"device {asked!r} is not available: {str(error).splitlines()[0]}",
            hint="use --device cpu",
            exit_code=UNSUPPORTED,
        ) from error
    return device


def choose_dtype(asked: str, stored: str, device: torch.device) -> str:
    """`auto`: the checkpoint's own 16-bit type where the hardware computes in it, else float32.

    `stored` is the safetensors name of the type the linears are stored in, such as `BF16`.
    """
    if asked != "auto":
        return asked
    if device.type == "cuda":
        return {"F16": "float16", "BF16": "bfloat16"}.get(stored, "float32")
    return "bfloat16" if stored == "BF16" and processor.has_bfloat16() else "float32"


def decide(
    skeleton: Skeleton,
    specs: Sequence[LinearSpec],
    method: Method,
    options: RunOptions,
    shape: tuple[int, int],
    kept: dict,
) -> tuple[Execution, int]:
    """How the job runs on calibration tokens of `shape`, and the peak memory it needs for that, in bytes.

    `kept` is the execution of the job being resumed, or empty: where the user says nothing, it stays.
    Raises QuantkitError (exit code 5) when not even the frugal way fits the memory.
    """
    samples, seqlen = shape
    batch_size = options.batch_size or kept.get("batch_size") or default_batch_size(seqlen)
    tokens, batch_tokens = samples * seqlen, min(batch_size, samples) * seqlen
    need = {
        mode: _memory(skeleton, specs, method, tokens, batch_tokens, mode) for mode in ("suspend", "repeat")
    }
    free = available_memory(skeleton.device)
    mode = options.sequential
    if mode == "auto":
        mode = kept.get("sequential") or ("suspend" if need["suspend"] < 0.8 * free else "repeat")
    check_memory(need[mode], free, "a smaller --batch-size or --sequential repeat")
    dtype = str(skeleton.dtype).removeprefix("torch.")
    return Execution(dtype, str(skeleton.device), batch_size, mode, torch.get_num_threads()), need[mode]


def default_batch_size(seqlen: int) -> int:
    """Sequences per forward pass, where the user does not say."""
    return max(1, BATCH_TOKENS // seqlen)


def check_memory(need: int, free: int, remedy: str) -> None:
    """Raise QuantkitError (exit code 5) unless `need` bytes are free."""
    if need > free:
        raise QuantkitError(
            f"the job needs about {need / GIB:.1f} GiB of memory, {free / GIB:.1f} GiB are free",
            hint=f"use fewer --samples, shorter --seqlen, {remedy}",
            exit_code=RESOURCES,
        )


def plan(
    checkpoint: Checkpoint, specs: Sequence[LinearSpec], method: Method, execution: Execution, memory: int
) -> JobPlan:
    """Sizes of a job, exact from shapes; `memory` is what `decide` predicted."""
    sizes = method.output.sizes(checkpoint, specs, method.layout)
    staged = sum(method.layout.nbytes(spec) for spec in specs if spec.grid)
    return JobPlan(
        execution=execution,
        memory_bytes=memory,
        disk_bytes=staged + sizes.total,  # staged blocks, then the merged files beside them
        output_bytes=sizes.total,
        source_bytes=sum(info.nbytes for info in checkpoint.infos.values()),
        bits_per_weight=sizes.bits_per_weight,
    )


def _memory(
    skeleton: Skeleton, specs: Sequence[LinearSpec], method: Method, tokens: int, batch_tokens: int, mode: str
) -> int:
    """Peak bytes above the interpreter."""
    if not any(spec.grid for spec in specs):  # encoded tensor by tensor, after a forward pass at most
        tensors = skeleton.checkpoint.infos.values()
        encode = ENCODING + max(6 * math.prod(info.shape) for info in tensors)  # as read, and its codes
        return max(encode, forward_memory(skeleton, specs, tokens, batch_tokens) if method.needs else 0)
    shapes = Shapes(
        linears=[(spec.local, spec.out_features, spec.in_features) for spec in specs if spec.block == 0],
        rest=_rest(skeleton),
        largest=_largest_outside(skeleton),
        element=skeleton.dtype.itemsize,
        tokens=tokens,
        batch_tokens=batch_tokens,
    )
    return peak_memory(
        shapes,
        calibrated=bool(method.needs),
        hessian="hessian" in method.needs,
        transform=method.transform is not None,
        suspend=mode == "suspend",
        tables=TABLES.get(method.name, 0),
    )


def _rest(skeleton: Skeleton) -> int:
    """Parameters outside the blocks."""
    inside = skeleton.blocks_name + "."
    outside = (p for name, p in skeleton.model.named_parameters() if not name.startswith(inside))
    return sum(parameter.numel() for parameter in outside)


def _largest_outside(skeleton: Skeleton) -> int:
    """Bytes of the largest stored tensor that belongs to no block."""
    inside = re.compile(rf"(^|\.){re.escape(skeleton.blocks_name.rpartition('.')[2])}\.\d+\.")
    infos = skeleton.checkpoint.infos.values()
    return max((info.nbytes for info in infos if not inside.search(info.name)), default=0)


def forward_memory(skeleton: Skeleton, specs: Sequence[LinearSpec], tokens: int, batch_tokens: int) -> int:
    """Peak bytes of running the blocks: rest of the model, one block, the states, a batch's activations."""
    element = skeleton.dtype.itemsize
    first = [spec for spec in specs if spec.block == 0]
    block = sum(spec.weights for spec in first)
    states = tokens * min(spec.in_features for spec in first) * element
    batch = batch_tokens * sum(spec.out_features for spec in first) * element
    batch += batch_tokens * max(spec.in_features for spec in first) * 4
    return (_rest(skeleton) + 2 * block) * element + states + batch


def available_memory(device: torch.device) -> int:
    """Free bytes on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def check_disk(folder: Path, need: int) -> None:
    """Raise QuantkitError (exit code 5) unless `need` bytes fit on the disk of `folder`."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if need > free:
        raise QuantkitError(
            f"{folder} needs about {need / GIB:.2f} GiB of disk, {free / GIB:.2f} GiB are free",
            hint="free some space or choose another --output",
            exit_code=RESOURCES,
        )
