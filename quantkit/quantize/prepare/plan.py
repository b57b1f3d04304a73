"""The job before it runs: what it takes in memory and disk, decided and checked on shapes alone."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.errors import RESOURCES, USAGE, QuantkitError, count
from quantkit.layouts import LinearSpec
from quantkit.models.files import reading
from quantkit.models.machine import distributed
from quantkit.models.machine.device import is_accelerator
from quantkit.models.machine.held import ROUTED
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.streaming import streamed
from quantkit.quantize.methods import Method
from quantkit.quantize.prepare.memory import (
    BATCH_TOKENS,
    Peak,
    Shapes,
    peak_memory,
    scratch_bytes,
)
from quantkit.tables import size

ENCODING = 1 << 24  # temporaries of an encoder


@dataclass(frozen=True)
class Execution:
    """How the job runs; all fields but the last two decide bytes of the output and stand in the fingerprint.

    states: `device`, `host` or `disk`, where the hidden states of the calibration tokens are kept. at_once:
    sites of a layer's experts whose statistics a repeated forward gathers in one pass.
    """

    dtype: str
    device: str
    batch_size: int
    sequential: str
    threads: int
    states: str = "device"
    at_once: int = 1

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def decisive(self) -> dict:
        """What the bytes of the output depend on."""
        return {name: value for name, value in asdict(self).items() if name not in ("states", "at_once")}


@dataclass(frozen=True)
class JobPlan:
    """Predicted peaks in bytes, of each rank, and the size of the output. memory_bytes: where it computes;
    host_bytes: on the host, which is the same place for a CPU, above what the interpreter itself takes."""

    execution: Execution
    memory_bytes: int
    host_bytes: int
    disk_bytes: int
    output_bytes: int
    source_bytes: int
    bits_per_weight: float
    ranks: int = 1


def default_batch_size(seqlen: int) -> int:
    """Sequences per forward pass, where the user does not say."""
    return max(1, BATCH_TOKENS // seqlen)


def sequences_at_once(asked: int | None, shape: tuple[int, int]) -> int:
    """Sequences per forward pass over tokens of `shape`; where the user does not say, so few that every rank
    has some.

    Raises QuantkitError where ranks would be left without.
    """
    samples, seqlen = shape
    size = asked or min(default_batch_size(seqlen), max(1, samples // distributed.count()))
    if -(-samples // size) < distributed.count():
        raise QuantkitError(
            f"{count(samples, 'calibration sequence')} in batches of {size} are fewer batches than the "
            f"{distributed.count()} processes",
            "start fewer processes, or use a smaller --batch-size or more --samples",
            USAGE,
        )
    return size


def own_batches(tokens: Tensor, size: int) -> list[Tensor]:
    """This rank's of the batches that `tokens [samples, seqlen]` are cut into, so many sequences each."""
    return list(distributed.share(tokens.split(size)))


def plan(
    skeleton: Skeleton,
    specs: Sequence[LinearSpec],
    method: Method,
    execution: Execution,
    peak: Peak,
    tokens: int,
) -> JobPlan:
    """Sizes of a job over so many `tokens`, exact from shapes; `peak` is what `room.decide` predicted."""
    checkpoint, scratch, spilled = skeleton.checkpoint, 0, 0
    if "curvature" in method.needs and any(spec.grid for spec in specs):
        scratch = scratch_bytes(len(skeleton.blocks), shapes_of(skeleton, specs, tokens, 0))
    if execution.states == "disk":
        streams = 2 if "drift" in method.needs else 1
        spilled = streams * tokens * shapes_of(skeleton, specs, tokens, 0).hidden * skeleton.dtype.itemsize
    sizes = method.output.sizes(checkpoint, specs, method.layout)
    staged = sum(method.layout.nbytes(spec) for spec in specs if spec.grid)
    return JobPlan(
        execution=execution,
        memory_bytes=peak.computing,
        host_bytes=peak.host,
        # staged blocks, then the merged files beside them
        disk_bytes=max(staged + sizes.total, scratch) + spilled,
        output_bytes=sizes.total,
        source_bytes=checkpoint.stored_bytes,
        bits_per_weight=sizes.bits_per_weight,
        ranks=distributed.count(),
    )


def job_memory(
    skeleton: Skeleton,
    specs: Sequence[LinearSpec],
    method: Method,
    tokens: int,
    batch_tokens: int,
    mode: str,
    states: str,
    at_once: int = 1,
) -> Peak:
    """Peak bytes above the interpreter of a job on so many tokens of one rank, if it runs so."""
    accelerated = is_accelerator(skeleton.device)
    if not any(spec.grid for spec in specs):  # encoded tensor by tensor, after a forward pass at most
        encode = ENCODING + method.output.encoding(skeleton.checkpoint, specs)
        spilled = states == "disk"
        forward = (
            forward_memory(skeleton, specs, tokens, batch_tokens, spilled=spilled) if method.needs else 0
        )
        return Peak(max(encode, forward), encode) if accelerated else Peak(0, max(encode, forward))
    shapes = shapes_of(skeleton, specs, tokens, batch_tokens)
    return peak_memory(
        shapes,
        calibrated=bool(method.needs),
        hessian="hessian" in method.needs,
        transform=method.transform is not None and method.transform.sample == 1,
        suspend=mode == "suspend",
        tables=method.tables,
        states=("device" if states == "device" else "host") if accelerated else None,
        at_once=at_once,
        drift="drift" in method.needs,
        gradients="curvature" in method.needs,
        sampled=method.transform is not None and method.transform.sample < 1,
        spilled=states == "disk",
        outside=method.outside,
    )


def shapes_of(skeleton: Skeleton, specs: Sequence[LinearSpec], tokens: int, batch_tokens: int) -> Shapes:
    """Of a job, as far as memory goes."""
    largest = _largest_block(specs)
    config = skeleton.checkpoint.text_config
    return Shapes(
        linears=[(spec.local, spec.out_features, spec.in_features) for spec in largest],
        rest=_rest(skeleton),
        largest=_largest_outside(skeleton),
        converted=_largest_outside(skeleton, kept=skeleton.dtype),
        element=skeleton.dtype.itemsize,
        tokens=tokens,
        batch_tokens=batch_tokens,
        width=_hidden_size(skeleton),
        experts=frozenset(streamed(skeleton.blocks[largest[0].block])),
        streamed=skeleton.streams,
        vocabulary=getattr(config, "vocab_size", 0),
        active=next((getattr(config, name) for name in ROUTED if getattr(config, name, None)), 1),
    )


def _largest_block(specs: Sequence[LinearSpec]) -> list[LinearSpec]:
    """The linears of the block that has most weights; of equal ones the first."""
    weights: Counter[int] = Counter()
    for spec in specs:
        weights[spec.block] += spec.weights
    index = max(sorted(weights), key=weights.__getitem__)
    return [spec for spec in specs if spec.block == index]


def _hidden_size(skeleton: Skeleton) -> int | None:
    return getattr(skeleton.checkpoint.config.get_text_config(), "hidden_size", None)


def _rest(skeleton: Skeleton) -> int:
    """Parameters outside the blocks."""
    inside = skeleton.names.blocks + "."
    outside = (p for name, p in skeleton.model.named_parameters() if not name.startswith(inside))
    return sum(parameter.numel() for parameter in outside)


def _largest_outside(skeleton: Skeleton, kept: torch.dtype | None = None) -> int:
    """Bytes of the largest stored tensor that belongs to no block, and is not of the type `kept`."""
    inside = re.compile(rf"(^|\.){re.escape(skeleton.names.blocks.rpartition('.')[2])}\.\d+\.")
    outside = (info for info in skeleton.checkpoint.infos.values() if not inside.search(info.name))
    return max(
        (info.nbytes for info in outside if not kept or reading.DTYPES.get(info.dtype) != kept), default=0
    )


def forward_memory(
    skeleton: Skeleton, specs: Sequence[LinearSpec], tokens: int, batch_tokens: int, spilled: bool = False
) -> int:
    """Peak bytes of running the blocks: rest of the model, one block, the states, unless they are `spilled`,
    a batch's activations."""
    element, shapes = skeleton.dtype.itemsize, shapes_of(skeleton, specs, tokens, batch_tokens)
    everywhere = sum(row[1] for row in shapes.linears if row[0] not in shapes.experts)
    states = (3 * batch_tokens if spilled else tokens) * shapes.hidden * element
    batch = batch_tokens * (everywhere + 3 * shapes.spread * bool(shapes.experts)) * element
    batch += batch_tokens * shapes.widest * 4 + shapes.waiting
    return (shapes.rest + 2 * shapes.block) * element + states + batch


def check_disk(folder: Path, need: int) -> None:
    """Raise QuantkitError (exit code 5) unless `need` bytes fit on the disk of `folder`."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if need > free:
        raise QuantkitError(
            f"{folder} needs about {size(need)} of disk, {size(free)} are free",
            hint="free some space or choose another --output",
            exit_code=RESOURCES,
        )
