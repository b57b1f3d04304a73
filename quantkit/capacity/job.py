"""What a quantization job takes, method by method: peak memory, disk and time, from shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from quantkit import layouts
from quantkit.capacity import formats, job_time
from quantkit.capacity.devices import Device
from quantkit.capacity.parameters import DTYPE_BYTES, Parameters
from quantkit.capacity.settings import Settings
from quantkit.models.machine import held, processor
from quantkit.models.machine.memory import room
from quantkit.quantize import methods
from quantkit.quantize.prepare.memory import (
    BATCH_TOKENS,
    COMFORT,
    MIB,
    Needs,
    Peak,
    Shapes,
    peak_memory,
    sites_at_once,
)

INTERPRETER_BYTES = 300 * MIB  # Python with torch for CPUs and transformers, before a job begins; measured
NOTHING = {"peak_memory_bytes": None, "disk_bytes": None, "seconds": None}


def of_model(
    parameters: Parameters,
    settings: Settings,
    device: Device | None,
    samples: int,
    seqlen: int,
    layout: str | None = None,
    ranks: int = 1,
) -> dict[str, Any]:
    """Method -> what its job takes with default options, or why quantkit refuses it; of several processes
    (`ranks`) what each takes, which share this machine where no GPU is asked about.

    layout: how the model is quantized already, None where it is not.
    """
    unread = layout is not None and layout not in {module.NAME for module in layouts.modules()}
    reason = f"linears stored as {layout} are not read" if unread else ""
    needs = "--allow-requantize" if layout else None
    return {
        method: NOTHING | {"reason": reason}
        if reason
        else _of_method(method, parameters, settings, device, samples, seqlen, ranks) | {"needs": needs}
        for method in methods.available()
    }


def _of_method(
    method: str,
    parameters: Parameters,
    settings: Settings,
    device: Device | None,
    samples: int,
    seqlen: int,
    ranks: int,
) -> dict[str, Any]:
    work = methods.load(method).WORK
    weights = formats.weights(formats.of_method(method), parameters, settings)
    if weights.reason:
        return NOTHING | {"reason": weights.reason}
    if ranks > 1 and not work.forwards:
        return NOTHING | {"reason": f"nothing in it that {ranks} processes could share"}
    on_gpu = device is not None and device.kind == "cuda"
    whole, samples = samples, -(-samples // ranks)
    seqlen = min(seqlen, settings.context or seqlen)
    dtype = compute_dtype("float32" if parameters.quantized else settings.stored_dtype, on_gpu)
    memory = device.memory_bytes if on_gpu else room().nbytes // ranks
    shapes = of_block(parameters, DTYPE_BYTES[dtype], samples, seqlen, settings.hidden)
    if shapes.experts:
        shapes = mixture(shapes, settings, memory if on_gpu else None)
    needs, transform = work.forwards > 0, work.transform
    wanted = Needs(needs, needs, 1.0 if transform else work.sample, outside=work.outside)

    def peak(suspend: bool, at_once: int = 1) -> Peak:
        return peak_memory(shapes, wanted, suspend, accelerated=on_gpu, at_once=at_once)

    base = 0 if on_gpu else INTERPRETER_BYTES
    suspend = needs and not transform and (memory is None or peak(True).computing < COMFORT * memory)
    seconds, basis = job_time.seconds(work, parameters, settings, device, whole, seqlen, suspend, ranks)
    need = peak(suspend)
    if needs and not suspend and not transform:
        need = peak(suspend, sites_at_once(shapes, memory, need.computing))
    return {
        "peak_memory_bytes": need.computing + base,
        "above_interpreter_bytes": need.computing,
        "host_memory_bytes": need.host + INTERPRETER_BYTES,
        "fits": None if memory is None else need.computing <= memory,
        "device": device.name if on_gpu else "cpu",
        "dtype": dtype,
        "sequential": ("suspend" if suspend else "repeat") if needs and not transform else None,
        "calibration_tokens": samples * seqlen if needs else 0,
        "disk_bytes": weights.packed_bytes + weights.bytes,  # staged blocks, then the files beside them
        "output_bytes": weights.bytes,
        "seconds": seconds,
        "basis": basis,
        **({"ranks": ranks} if ranks > 1 else {}),
    }


def of_block(
    parameters: Parameters, element: int, samples: int, seqlen: int, hidden: int | None = None
) -> Shapes:
    """The shapes of a job over `samples` sequences of `seqlen` tokens."""
    outside = [tensor for tensor in parameters.tensors if tensor.block is None]
    copy = parameters.head_copy
    batch = min(max(1, BATCH_TOKENS // seqlen), samples)
    weights: Counter[int] = Counter()
    for tensor in parameters.linears:
        weights[tensor.block] += tensor.size
    index = max(sorted(weights), key=weights.__getitem__)
    return Shapes(
        linears=[
            (tensor.local.removesuffix(".weight"), tensor.out_features, tensor.in_features)
            for tensor in parameters.linears
            if tensor.block == index
        ],
        rest=sum(tensor.size for tensor in outside) - (copy.size if copy else 0),
        largest=max((tensor.nbytes for tensor in outside), default=0),
        element=element,
        tokens=samples * seqlen,
        batch_tokens=batch * seqlen,
        width=hidden,
        experts=frozenset(
            tensor.local.removesuffix(".weight")
            for tensor in parameters.linears
            if tensor.block == index and tensor.is_expert
        ),
    )


def mixture(shapes: Shapes, settings: Settings, free: int | None) -> Shapes:
    """The same with experts that are streamed if that pays; free: bytes of an accelerator."""
    experts = sum(out * in_features for name, out, in_features in shapes.linears if name in shapes.experts)
    streamed = held.streams(experts * shapes.element, free)
    return replace(shapes, streamed=streamed, active=settings.filled(*held.ROUTED) or 1)


def compute_dtype(stored: str, on_gpu: bool) -> str:
    """Precision of forward passes: the stored one where the hardware computes in it, else float32."""
    if on_gpu:
        return stored
    return "bfloat16" if stored == "bfloat16" and processor.has_bfloat16() else "float32"
