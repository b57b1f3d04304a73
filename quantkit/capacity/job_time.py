"""How long a quantization job takes: a range, and what it rests on.

On a CPU: floating-point operations, counted, at the rate that cores reach in matrix products, plus what
each weight costs besides; measured by scripts/check_plan.py and scripts/bench_*.py. On a GPU nothing was
measured with quantkit: the range is that of published runs of the same algorithms, scaled by FLOPS.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.capacity.devices import Device
from quantkit.capacity.parameters import Parameters, Tensor
from quantkit.capacity.settings import Settings
from quantkit.grids import processor

BATCH_TOKENS = 4096  # of one forward pass: matrix products run at full rate, activations stay small
CORE_FLOPS = (80e9, 20e9)  # float32 products of one core: with wide vectors at a high clock, and old or busy
START_SECONDS = (4.0, 12.0)  # imports, tokenizer, calibration text
A100_TFLOPS = 312
BYTES_PER_SECOND = (1e9, 1e8)  # read, hashed, encoded and written, where calibration is not needed


@dataclass(frozen=True)
class Work:
    """What a method does besides running blocks.

    forwards: passes of all tokens through a block. products: operations spent on each linear, in `out · in²`.
    seconds: per weight and core, quick and slow, for all that is no matrix product. a100_minutes: per
    billion parameters, quick and slow; published: whose. outside: embedding and head are encoded, too, the
    latter by its own second moments, for which all tokens run through the blocks once more.
    """

    forwards: float
    products: float
    seconds: tuple[float, float]
    a100_minutes: tuple[float, float] | None = None
    published: str = ""
    outside: bool = False


GPTQ_PUBLISHED = "GPTQ's paper, 13B in 21 min and 175B in 4.2 h; llm-compressor, 8B in half an hour"
WORK = {
    "int8": Work(0, 0, (12e-9, 50e-9)),
    "nf4": Work(0, 0, (15e-9, 60e-9)),
    "gptq": Work(1, 9, (0.25e-6, 1e-6), (1.4, 4), GPTQ_PUBLISHED),
    "gguf": Work(1, 9, (0.3e-6, 1.6e-6), (1.4, 8), GPTQ_PUBLISHED, outside=True),
    "awq": Work(2, 25, (0.3e-6, 1.2e-6), (0.8, 2.2), "AutoAWQ, 7B in 10 to 15 min and 70B in an hour"),
}
OVERHEAD = 1.7  # of a block's forward pass over its linears' products: attention, norms, activations


def seconds(
    method: str,
    parameters: Parameters,
    settings: Settings,
    device: Device | None,
    samples: int,
    seqlen: int,
    suspend: bool,
) -> tuple[list[float] | None, str]:
    """`([quick, slow], basis)`; None where there is nothing to go by, and the basis says so."""
    work = WORK[method]
    if device is not None and device.kind == "apple":
        return None, "nothing was measured on Apple's processors"
    if device is not None and device.kind == "cuda":
        return _on_gpu(work, parameters, device)
    cores = processor.cores()
    operations = _operations(work, parameters, samples, seqlen, suspend)
    times = [
        start + (operations / rate + each * _encoded(work, parameters)) / cores
        for start, rate, each in zip(START_SECONDS, CORE_FLOPS, work.seconds, strict=True)
    ]
    return times, f"operations at 20 to 80 GFLOPS a core, {cores} cores of this machine"


def _on_gpu(work: Work, parameters: Parameters, device: Device) -> tuple[list[float] | None, str]:
    if work.a100_minutes is None:
        rates = zip(START_SECONDS, BYTES_PER_SECOND, strict=True)
        times = [start + parameters.stored_bytes / rate for start, rate in rates]
        return times, "the source at 0.1 to 1 GB/s"
    if not device.tflops:
        return None, "no FLOPS are known"
    minutes = parameters.count / 1e9
    quick, slow = (60 * each * minutes for each in work.a100_minutes)
    slower = max(1.0, A100_TFLOPS / device.tflops) ** 0.5  # much of it is no matrix product
    faster = min(1.0, A100_TFLOPS / device.tflops) ** 0.5
    return [quick * faster, slow * slower], f"others' runs on one A100, nothing measured: {work.published}"


def _encoded(work: Work, parameters: Parameters) -> int:
    """Weights that are solved or rounded."""
    outside = _outside(parameters) if work.outside else []
    return sum(tensor.size for tensor in (*parameters.linears, *outside))


def _outside(parameters: Parameters) -> list[Tensor]:
    """Embedding and head; one of them where they are tied."""
    return [t for t in parameters.tensors if t.block is None and len(t.shape) > 1]


def _operations(work: Work, parameters: Parameters, samples: int, seqlen: int, suspend: bool) -> float:
    """Floating-point operations of forward passes, second moments, the solver and verification."""
    if not work.forwards:
        return 0.0
    tokens = samples * seqlen
    forwards = work.forwards if suspend or work.forwards > 1 else 3.0  # run again up to each of a few sites
    forwards += work.outside + min(1.0, max(BATCH_TOKENS, seqlen) / tokens)  # the latter: verification
    sites = {(t.block, t.local.rpartition(".")[0], t.in_features) for t in parameters.linears}
    moments = sum(width**2 for *_, width in sites) * tokens
    solved = [*parameters.linears, *(_outside(parameters)[-1:] if work.outside else ())]
    solver = work.products * sum(tensor.size * tensor.shape[-1] for tensor in solved)
    weights = sum(tensor.size for tensor in parameters.linears)
    return forwards * OVERHEAD * 2 * weights * tokens + moments + solver
