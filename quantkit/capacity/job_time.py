"""How long a quantization job takes: a range, and what it rests on.

On a CPU: floating-point operations, counted, at the rate that cores reach in matrix products, plus what
each weight costs besides; measured by scripts/bench_memory.py and scripts/bench_*.py. On a GPU nothing was
measured with quantkit: the range is that of published runs of the same algorithms, scaled by FLOPS.
"""

from __future__ import annotations

from quantkit.capacity.devices import Device
from quantkit.capacity.parameters import Parameters, Tensor
from quantkit.capacity.settings import Settings
from quantkit.models.machine import processor
from quantkit.quantize.methods import Work
from quantkit.quantize.prepare.memory import BATCH_TOKENS

CORE_FLOPS = (80e9, 20e9)  # float32 products of one core: with wide vectors at a high clock, and old or busy
START_SECONDS = (4.0, 12.0)  # imports, tokenizer, calibration text
A100_TFLOPS = 312
BYTES_PER_SECOND = (1e9, 1e8)  # read, hashed, encoded and written, where calibration is not needed


OVERHEAD = 1.7  # of a block's forward pass over its linears' products: attention, norms, activations


def seconds(
    work: Work,
    parameters: Parameters,
    settings: Settings,
    device: Device | None,
    samples: int,
    seqlen: int,
    suspend: bool,
    ranks: int = 1,
) -> tuple[list[float] | None, str]:
    """`([quick, slow], basis)`; None where there is nothing to go by, and the basis says so. ranks: of
    processes at the job, on a GPU each, or together on the cores of this machine."""
    if device is not None and device.kind == "apple":
        return None, "nothing was measured on Apple's processors"
    if device is not None and device.kind == "cuda":
        times, basis = _on_gpu(work, parameters, device)
        if ranks == 1 or times is None:
            return times, basis
        left = _operations(work, parameters, samples, seqlen, suspend, ranks)
        left /= _operations(work, parameters, samples, seqlen, suspend)
        return [each * left for each in times], f"{basis}; a rank does {left:.0%} of the operations"
    cores = processor.cores()
    operations = _operations(work, parameters, samples, seqlen, suspend, ranks)
    times = [
        start + (operations / rate + each * _encoded(work, parameters) / ranks) / max(1, cores // ranks)
        for start, rate, each in zip(START_SECONDS, CORE_FLOPS, work.seconds, strict=True)
    ]
    shared = f", {ranks} processes on them" if ranks > 1 else ""
    return times, f"operations at 20 to 80 GFLOPS a core, {cores} cores of this machine{shared}"


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


def _operations(
    work: Work, parameters: Parameters, samples: int, seqlen: int, suspend: bool, ranks: int = 1
) -> float:
    """Floating-point operations of forward passes, second moments, the solver and verification, those of one
    rank: each has its share of the tokens and of every linear's rows, all factor every Hessian, one verifies.
    """
    if not work.forwards:
        return 0.0
    tokens = samples * seqlen
    forwards = work.forwards if suspend or work.forwards > 1 else 3.0  # run again up to each of a few sites
    forwards += work.sample + work.outside
    verification = min(1.0, max(BATCH_TOKENS, seqlen) / tokens)
    forwards = forwards / ranks + verification
    sites = {(t.block, t.local.rpartition(".")[0], t.in_features) for t in parameters.linears}
    moments = sum(width**2 for *_, width in sites) * tokens * (1 + work.sample) / ranks
    factors = sum(width**3 for *_, width in sites) / 3 * (1 - 1 / ranks)
    solved = [*parameters.linears, *(_outside(parameters)[-1:] if work.outside else ())]
    solver = work.products * sum(tensor.size * tensor.shape[-1] for tensor in solved) / ranks + factors
    weights = sum(tensor.size for tensor in parameters.linears)
    return forwards * OVERHEAD * 2 * weights * tokens + moments + solver
