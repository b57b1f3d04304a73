"""The job before it runs: what it takes in memory and disk, decided and checked on shapes alone."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.errors import RESOURCES, USAGE, QuantkitError, count
from quantkit.layouts import LinearSpec
from quantkit.models.machine import distributed
from quantkit.models.machine.device import is_accelerator
from quantkit.models.machine.expert_share import ROUTED
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.streaming import streamed
from quantkit.quantize.methods import Method
from quantkit.quantize.prepare.memory import (
    BATCH_TOKENS,
    Peak,
    Shapes,
    forward_memory,
    peak_memory,
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


def job_memory(
    skeleton: Skeleton,
    specs: Sequence[LinearSpec],
    method: Method,
    shapes: Shapes,
    shape: tuple[int, int],
    way: Execution,
) -> Peak:
    """Peak bytes above the interpreter of a job on calibration tokens of `shape`, of one rank."""
    accelerated, (samples, seqlen) = is_accelerator(skeleton.device), shape
    batches = -(-samples // way.batch_size)
    own = min(samples, way.batch_size * -(-batches // distributed.count()))  # of one rank, at most
    batch_tokens = min(way.batch_size, own) * seqlen
    shapes = replace(shapes, tokens=own * seqlen, batch_tokens=batch_tokens)
    if not any(spec.grid for spec in specs):  # encoded tensor by tensor, after a forward pass at most
        encode = ENCODING + method.output.encoding(skeleton.checkpoint, specs)
        most = max(encode, forward_memory(shapes, way.states == "disk") if method.needs else 0)
        return Peak(most, encode) if accelerated else Peak(0, most)
    scaled = method.transform.sample if method.transform else 0
    suspend = way.sequential == "suspend"
    return peak_memory(
        shapes, method.needs, scaled, method.outside, suspend, way.states, accelerated, way.at_once
    )


def shapes_of(skeleton: Skeleton, specs: Sequence[LinearSpec], tokens: int, batch_tokens: int) -> Shapes:
    """Of a job, as far as memory goes; of the block that has most weights, of equal ones the first."""
    weights: Counter[int] = Counter()
    for spec in specs:
        weights[spec.block] += spec.weights
    index = max(sorted(weights), key=weights.__getitem__, default=0)
    config, inside = skeleton.checkpoint.text_config, f"{skeleton.names.blocks}."
    stored = re.compile(rf"(^|\.){re.escape(inside.split('.')[-2])}\.\d+\.")
    infos = skeleton.checkpoint.infos.values()
    parameters = skeleton.model.named_parameters()
    return Shapes(
        linears=[(one.local, one.out_features, one.in_features) for one in specs if one.block == index],
        rest=sum(part.numel() for name, part in parameters if not name.startswith(inside)),
        largest=max((info.nbytes for info in infos if not stored.search(info.name)), default=0),
        element=skeleton.dtype.itemsize,
        tokens=tokens,
        batch_tokens=batch_tokens,
        width=getattr(config, "hidden_size", None),
        experts=frozenset(streamed(skeleton.blocks[index])),
        streamed=skeleton.streams,
        active=next((getattr(config, name) for name in ROUTED if getattr(config, name, None)), 1),
    )


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
