"""What a quantization job takes, method by method, from shapes: peak memory, disk, and a range of time.

On a CPU time is floating-point operations, counted, at the rate that cores reach in matrix products, plus
what each weight costs besides; measured by scripts/bench*.py. On a GPU nothing was measured with quantkit:
the range is that of published runs of the same algorithms, scaled by FLOPS.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from quantkit import layouts
from quantkit.capacity import formats
from quantkit.capacity.devices import Device
from quantkit.capacity.parameters import DTYPE_BYTES, Parameters, Tensor
from quantkit.capacity.settings import Settings
from quantkit.models.machine import expert_share, processor
from quantkit.models.machine.memory import room
from quantkit.quantize import methods
from quantkit.quantize.methods import Work
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
CORE_FLOPS = (80e9, 20e9)  # float32 products of one core: with wide vectors at a high clock, and old or busy
START_SECONDS = (4.0, 12.0)  # imports, tokenizer, calibration text
A100_TFLOPS = 312
BYTES_PER_SECOND = (1e9, 1e8)  # read, hashed, encoded and written, where calibration is not needed
OVERHEAD = 1.7  # of a block's forward pass over its linears' products: attention, norms, activations


def of_model(
    parameters: Parameters,
    settings: Settings,
    device: Device | None,
    samples: int,
    seqlen: int,
    layout: str | None = None,
) -> dict[str, Any]:
    """Method -> what its job takes with default options, or why quantkit refuses it.

    layout: how the model is quantized already, None where it is not.
    """
    if layout is not None and layout not in {module.NAME for module in layouts.modules()}:
        refused = NOTHING | {"reason": f"linears stored as {layout} are not read"}
        return {method: refused for method in methods.available()}
    needs = {"needs": "--allow-requantize" if layout else None}
    seqlen = min(seqlen, settings.context or seqlen)
    asked = parameters, settings, device, samples, seqlen
    return {name: _Job(methods.load(name).WORK, *asked).record(name) | needs for name in methods.available()}


@dataclass(frozen=True)
class _Job:
    """One method's job on `samples` sequences of `seqlen` tokens."""

    work: Work
    parameters: Parameters
    settings: Settings
    device: Device | None
    samples: int
    seqlen: int

    @property
    def on_gpu(self) -> bool:
        return self.device is not None and self.device.kind == "cuda"

    def record(self, method: str) -> dict[str, Any]:
        """JSON of it."""
        work, device = self.work, self.device
        weights = formats.weights(formats.of_method(method), self.parameters, self.settings)
        if weights.reason:
            return NOTHING | {"reason": weights.reason}
        stored = "float32" if self.parameters.quantized else self.settings.stored_dtype
        dtype = compute_dtype(stored, self.on_gpu)
        memory = device.memory_bytes if self.on_gpu else room().nbytes
        free = memory if self.on_gpu else None
        shapes = shapes_of(
            self.parameters, self.settings, DTYPE_BYTES[dtype], self.samples, self.seqlen, free
        )
        calibrated, base = work.forwards > 0, 0 if self.on_gpu else INTERPRETER_BYTES
        scaled = 1.0 if work.transform else work.sample
        needs = Needs(calibrated, calibrated, scaled, outside=work.outside)

        def peak(suspend: bool, at_once: int = 1) -> Peak:
            return peak_memory(shapes, needs, suspend, accelerated=self.on_gpu, at_once=at_once)

        ordered = calibrated and not work.transform  # one site after another
        suspend = ordered and (memory is None or peak(True).computing < COMFORT * memory)
        need = peak(suspend)
        if ordered and not suspend:
            need = peak(suspend, sites_at_once(shapes, memory, need.computing))
        seconds, basis = self._seconds(suspend)
        return {
            "peak_memory_bytes": need.computing + base,
            "above_interpreter_bytes": need.computing,
            "host_memory_bytes": need.host + INTERPRETER_BYTES,
            "fits": None if memory is None else need.computing <= memory,
            "device": device.name if self.on_gpu else "cpu",
            "dtype": dtype,
            "sequential": ("suspend" if suspend else "repeat") if ordered else None,
            "calibration_tokens": self.samples * self.seqlen if calibrated else 0,
            "disk_bytes": weights.packed_bytes + weights.bytes,  # staged blocks, then the files beside them
            "output_bytes": weights.bytes,
            "seconds": seconds,
            "basis": basis,
        }

    def _seconds(self, suspend: bool) -> tuple[list[float] | None, str]:
        """`([quick, slow], basis)`; None where there is nothing to go by, and the basis says so."""
        if self.device is not None and self.device.kind == "apple":
            return None, "nothing was measured on Apple's processors"
        if self.on_gpu:
            return self._on_gpu()
        operations = self._operations(suspend)
        cores, weights = processor.cores(), sum(one.size for one in self.parameters.linears)
        weights += sum(one.size for one in self._outside)
        times = [
            start + (operations / rate + each * weights) / cores
            for start, rate, each in zip(START_SECONDS, CORE_FLOPS, self.work.seconds, strict=True)
        ]
        return times, f"operations at 20 to 80 GFLOPS a core, {cores} cores of this machine"

    def _on_gpu(self) -> tuple[list[float] | None, str]:
        if self.work.a100_minutes is None:
            rates = zip(START_SECONDS, BYTES_PER_SECOND, strict=True)
            stored = self.parameters.stored_bytes
            return [start + stored / rate for start, rate in rates], "the source at 0.1 to 1 GB/s"
        if not self.device.tflops:
            return None, "no FLOPS are known"
        quick, slow = (60 * each * self.parameters.count / 1e9 for each in self.work.a100_minutes)
        ratio = (A100_TFLOPS / self.device.tflops) ** 0.5  # much of it is no matrix product
        basis = f"others' runs on one A100, nothing measured: {self.work.published}"
        soonest, latest = START_SECONDS
        return [soonest + quick * min(1.0, ratio), latest + slow * max(1.0, ratio)], basis

    @property
    def _outside(self) -> list[Tensor]:
        """Embedding and head where they are encoded; one of them where they are tied."""
        tensors = self.parameters.tensors if self.work.outside else ()
        return [one for one in tensors if one.block is None and len(one.shape) > 1]

    def _operations(self, suspend: bool) -> float:
        """Floating-point operations of forward passes, second moments, the solver and verification."""
        work, linears, tokens = self.work, self.parameters.linears, self.samples * self.seqlen
        if not work.forwards:
            return 0.0
        forwards = work.forwards if suspend or work.forwards > 1 else 3.0  # again up to each of a few sites
        forwards += work.sample + work.outside + min(1.0, max(BATCH_TOKENS, self.seqlen) / tokens)
        sites = {(t.block, t.local.rpartition(".")[0], t.in_features) for t in linears}
        moments = sum(width**2 for *_, width in sites) * tokens * (1 + work.sample)
        solved = [*linears, *self._outside[-1:]]
        solver = work.products * sum(one.size * one.shape[-1] for one in solved)
        return forwards * OVERHEAD * 2 * sum(one.size for one in linears) * tokens + moments + solver


def shapes_of(
    parameters: Parameters, settings: Settings, element: int, samples: int, seqlen: int, free: int | None
) -> Shapes:
    """The shapes of a job over `samples` sequences of `seqlen` tokens, experts streamed if that pays; free:
    bytes of an accelerator."""
    outside = [tensor for tensor in parameters.tensors if tensor.block is None]
    copy = parameters.head_copy
    weights: Counter[int] = Counter()
    for tensor in parameters.linears:
        weights[tensor.block] += tensor.size
    index = max(sorted(weights), key=weights.__getitem__)
    block = {one.local.removesuffix(".weight"): one for one in parameters.linears if one.block == index}
    shapes = Shapes(
        linears=[(name, one.out_features, one.in_features) for name, one in block.items()],
        rest=sum(tensor.size for tensor in outside) - (copy.size if copy else 0),
        largest=max((tensor.nbytes for tensor in outside), default=0),
        element=element,
        tokens=samples * seqlen,
        batch_tokens=min(max(1, BATCH_TOKENS // seqlen), samples) * seqlen,
        width=settings.hidden,
        experts=frozenset(name for name, one in block.items() if one.is_expert),
    )
    if not shapes.experts:
        return shapes
    streamed = expert_share.streams(element * sum(block[name].size for name in shapes.experts), free)
    return replace(shapes, streamed=streamed, active=settings.filled(*expert_share.ROUTED) or 1)


def compute_dtype(stored: str, on_gpu: bool) -> str:
    """Precision of forward passes: the stored one where the hardware computes in it, else float32."""
    if on_gpu:
        return stored
    return "bfloat16" if stored == "bfloat16" and processor.has_bfloat16() else "float32"
