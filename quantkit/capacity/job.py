"""Peak memory, disk space and a range of time of a quantization job, for each method, from shapes.

CPU time: floating-point operations divided by the rate of matrix products, plus a time per weight; both from
scripts/bench*.py. GPU time: measured on an H200, on other devices scaled by FLOPS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from quantkit import layouts
from quantkit.capacity import formats
from quantkit.capacity.parameters import DTYPE_BYTES, TABLES, Parameters, Tensor
from quantkit.capacity.question import Question
from quantkit.capacity.source import Source
from quantkit.layouts import Statistic
from quantkit.models.machine import expert_share, processor
from quantkit.models.machine.memory import room
from quantkit.quantize import methods
from quantkit.quantize.calibrate import original_every
from quantkit.quantize.methods import MethodOptions, Work
from quantkit.quantize.prepare.memory import (
    BATCH_TOKENS,
    COMFORT,
    LOSS_TOKENS,
    MIB,
    Peak,
    Stages,
    loss_tokens,
    peak_memory,
    sites_at_once,
)
from quantkit.quantize.prepare.shapes import Shapes, of_largest_block

INTERPRETER_BYTES = 300 * MIB  # Python with torch for CPUs and transformers, before a job begins; measured
NOTHING = {"peak_memory_bytes": None, "disk_bytes": None, "seconds": None}
CORE_FLOPS = (80e9, 20e9)  # float32 products of one core: with wide vectors at a high clock, and old or busy
START_SECONDS = (4.0, 12.0)  # imports, tokenizer, calibration text
H200_TFLOPS = 989
BYTES_PER_SECOND = (1e9, 1e8)  # reading to writing, without calibration
OVERHEAD = 1.7  # time of a block's forward pass / time of its linears' products


def of_model(source: Source, question: Question) -> dict[str, Any]:
    """Return {method: JSON with needs of a job with default options, or with the reason for a refusal}."""
    layout = source.layout
    if layout is not None and layout not in {module.NAME for module in layouts.modules()}:
        refused = NOTHING | {"reason": f"linears stored as {layout} are not read"}
        return {method: refused for method in methods.available()}
    needs = {"needs": "--allow-requantize" if layout else None}
    question = replace(question, seqlen=min(question.seqlen, source.settings.context or question.seqlen))
    return {name: _record(name, source, question) | needs for name in methods.available()}


def _record(method: str, source: Source, question: Question) -> dict[str, Any]:
    """Return the JSON of one method's job."""
    parameters, settings, device = source.parameters, source.settings, question.single_device
    on_gpu, chosen = device is not None and device.kind == "cuda", methods.create(method)
    work, weights = chosen.work, formats.weights(chosen.stored_as, parameters, settings)
    if weights.reason:
        return NOTHING | {"reason": weights.reason}
    dtype = compute_dtype("float32" if parameters.quantized else settings.stored_dtype, on_gpu)
    memory = device.memory_bytes if on_gpu else room().nbytes
    free = memory if on_gpu else None
    shapes = _shapes(source, question, DTYPE_BYTES[dtype], free)
    calibrated = work.forwards > 0
    sample = 1.0 if work.transform else work.sample
    needs = _needs(chosen.options) if calibrated else frozenset()
    if vocabulary := settings.filled("vocab_size"):
        shapes = replace(shapes, predicted=4 * vocabulary * loss_tokens(None, calibrated, vocabulary))

    def peak(suspend: bool, at_once: int = 1) -> Peak:
        stages = Stages(shapes, needs, sample, work.outside, suspend, accelerated=on_gpu, at_once=at_once)
        return peak_memory(stages)

    ordered = calibrated and not work.transform  # sites are solved one after another
    together = on_gpu and shapes.experts and Statistic.HESSIAN in needs  # experts, with repeated passes
    suspend = ordered and not together and (memory is None or peak(True).computing < COMFORT * memory)
    need = peak(suspend)
    if ordered and not suspend:
        need = peak(suspend, sites_at_once(shapes, memory, need))
    seconds, basis = _seconds(work, needs, parameters, question, suspend)
    return {
        "peak_memory_bytes": need.computing + (0 if on_gpu else INTERPRETER_BYTES),
        "above_interpreter_bytes": need.computing,
        "host_memory_bytes": need.host + INTERPRETER_BYTES,
        "fits": None if memory is None else need.computing <= memory,
        "device": device.name if on_gpu else "cpu",
        "dtype": dtype,
        "sequential": ("suspend" if suspend else "repeat") if ordered else None,
        "calibration_tokens": question.samples * question.seqlen if calibrated else 0,
        "disk_bytes": weights.packed_bytes + weights.bytes,  # staged blocks and the finished files
        "output_bytes": weights.bytes,
        "seconds": seconds,
        "basis": basis,
    }


def _needs(options: MethodOptions) -> frozenset[Statistic]:
    """Return the statistics that the solver of these options needs."""
    feeds_back = options.solver != "rtn" and options.target == "original"
    return frozenset({Statistic.HESSIAN, Statistic.DRIFT} if feeds_back else {Statistic.HESSIAN})


def _seconds(
    work: Work, needs: frozenset[Statistic], parameters: Parameters, question: Question, suspend: bool
) -> tuple[list[float] | None, str]:
    """Return ([shortest, longest time], basis); without data, None instead of times, and the reason."""
    (soonest, latest), device = START_SECONDS, question.single_device
    if device is not None and device.kind == "apple":
        return None, "nothing was measured on Apple's processors"
    if device is None or device.kind != "cuda":
        cores = processor.cores()
        encoded = [tensor for tensor in parameters.outside if len(tensor.shape) > 1] if work.outside else []
        operations = _operations(work, needs, parameters, question, suspend)
        weights = sum(tensor.size for tensor in [*parameters.linears, *encoded])
        times = cpu_seconds(work, operations, weights, cores)
        times = [start + seconds for start, seconds in zip(START_SECONDS, times, strict=True)]
        return times, f"operations at 20 to 80 GFLOPS a core, {cores} cores of this machine"
    if work.h200_seconds is None:
        quick, slow = (parameters.stored_bytes / rate for rate in BYTES_PER_SECOND)
        return [soonest + quick, latest + slow], "the source at 0.1 to 1 GB/s"
    if not device.tflops:
        return None, "no FLOPS are known"
    quick, slow = (each * parameters.count / 1e9 for each in work.h200_seconds)
    ratio = H200_TFLOPS / device.tflops  # at most: a good part is not matrix products
    basis = "blocks of large models, measured on an H200; slower devices by their FLOPS"
    return [soonest + quick * min(1.0, ratio), latest + slow * max(1.0, ratio)], basis


def cpu_seconds(work: Work, operations: float, weights: float, cores: int) -> list[float]:
    """Return the shortest and the longest time on a CPU. operations: floating-point operations of matrix
    products. weights: number of weights that the method handles one by one."""
    rates = zip(CORE_FLOPS, work.seconds, strict=True)
    return [(operations / flops + seconds * weights) / cores for flops, seconds in rates]


def forward_operations(weights: int) -> float:
    """Return the floating-point operations per token of running blocks with this number of weights."""
    return OVERHEAD * 2 * weights


def solver_operations(work: Work, shapes: Iterable[Sequence[int]]) -> float:
    """Return the floating-point operations of solving matrices of the given `(out, in)`."""
    return work.products * sum(math.prod(shape) * shape[-1] for shape in shapes)


def _operations(
    work: Work, needs: frozenset[Statistic], parameters: Parameters, question: Question, suspend: bool
) -> float:
    """Return the number of floating-point operations of forward passes, Hessians, solver and verification."""
    linears, tokens = parameters.linears, question.samples * question.seqlen
    forward = forward_operations(sum(tensor.size for tensor in linears))
    measured = LOSS_TOKENS[work.forwards > 0] * (3 if work.forwards else 2)  # tokens that run for the loss
    if not work.forwards:
        return forward * measured
    forwards = work.forwards if suspend or work.forwards > 1 else 3.0  # the block runs again for each site
    forwards += work.sample + work.outside + min(1.0, max(BATCH_TOKENS, question.seqlen) / tokens)
    sites = {(t.block, t.local.rpartition(".")[0], t.in_features) for t in linears}
    squares = sum(width**2 for *_, width in sites) * tokens
    moments = squares * (1 + work.sample)
    if Statistic.DRIFT in needs:  # the original's moments, and products of its inputs with these
        share = 1 / original_every(tokens, max(width for *_, width in sites))
        forwards, moments = forwards + share, moments + 2 * share * squares
    head = [tensor for tensor in parameters.outside if len(tensor.shape) > 1][-1:] if work.outside else []
    solver = solver_operations(work, (tensor.shape for tensor in [*linears, *head]))
    return forward * (forwards * tokens + measured) + moments + solver


def _shapes(source: Source, question: Question, element: int, free: int | None) -> Shapes:
    """Return the shapes of a job. element: bytes per value. free: an accelerator's bytes; experts larger than
    a share of them are streamed."""
    outside, samples, seqlen = source.parameters.outside, question.samples, question.seqlen
    named = [(tensor, tensor.local.removesuffix(".weight")) for tensor in source.parameters.linears]
    shapes = of_largest_block(
        ((tensor.block, (name, tensor.out_features, tensor.in_features)) for tensor, name in named),
        lambda block: [name for tensor, name in named if tensor.block == block and tensor.is_expert],
        rest=sum(tensor.size for tensor in outside),
        largest=max((tensor.nbytes for tensor in outside), default=0),
        by_rows=sum(tensor.size for tensor in outside if _of_vocabulary(tensor, source)),
        element=element,
        tokens=samples * seqlen,
        batch_tokens=min(max(1, BATCH_TOKENS // seqlen), samples) * seqlen,
        width=source.settings.hidden,
    )
    if not shapes.experts:
        return shapes
    routed = sum(out * width for name, out, width in shapes.linears if name in shapes.experts)
    active = source.settings.filled(*expert_share.ROUTED) or 1
    return replace(shapes, streamed=expert_share.streams(element * routed, free), active=active)


def _of_vocabulary(tensor: Tensor, source: Source) -> bool:
    """Return whether a tensor outside the blocks is embedding or head, in values or ggml blocks."""
    rows, packed = tensor.shape[0], tensor.stored_nbytes is not None and source.layout != "gguf"
    fits = len(tensor.shape) == 2 and rows == source.settings.filled("vocab_size")
    return fits and not packed and not TABLES.search(tensor.name)


def compute_dtype(stored: str, on_gpu: bool) -> str:
    """Return the dtype of forward passes: the stored one if the hardware supports it, else float32."""
    if on_gpu:
        return stored
    return "bfloat16" if stored == "bfloat16" and processor.has_bfloat16() else "float32"
