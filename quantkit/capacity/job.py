"""Peak memory, disk space and time of a quantization job, for each method, from shapes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit import layouts
from quantkit.capacity import Unsupported, duration, formats, source, speed
from quantkit.capacity.duration import model_of
from quantkit.capacity.parameters import DTYPE_BYTES, TABLES, Tensor
from quantkit.capacity.question import Question
from quantkit.capacity.source import GGUF, Source
from quantkit.errors import QuantkitError, count
from quantkit.layouts import Statistic
from quantkit.models.machine import expert_share, processor
from quantkit.models.machine.memory import room
from quantkit.quantize import methods
from quantkit.quantize.methods import Method, Work
from quantkit.quantize.prepare.memory import (
    COMFORT,
    MIB,
    Peak,
    Stages,
    loss_tokens,
    peak_memory,
    sites_at_once,
    tokens_at_once,
)
from quantkit.quantize.prepare.shapes import Shapes, of_largest_block

if TYPE_CHECKING:  # imports torch
    from quantkit.quantize.job import Job

INTERPRETER_BYTES = 405 * MIB  # Python with torch for CPUs and transformers; measured
TOKEN_BYTES = 1400  # of a token in a tokenizer; measured 1,030 (Qwen2.5) to 1,320 (Gemma 3)
NOTHING = {"peak_memory_bytes": None, "disk_bytes": None, "seconds": None}
MEASURED = "a large model or blocks of it, measured on an H200"
EQUALLY_FAST = {"bits", "group_size", "sym", "layout"}  # options of methods
USUAL = (None, "suspend", "device")  # how a job runs if memory is no concern
H200_TFLOPS = 989
LIKE_H200 = ("h100", "h200")  # devices for which measured times are scaled by FLOPS
SCALED = 3  # factor within which a scaled time is right; see duration.FACTOR
MIXTURE = 2.0  # time of a layer of experts / that of a dense block of the same size; gptq on an H200


def of_model(source: Source, question: Question) -> dict[str, Any]:
    """Return {method: JSON with needs of a job with default options, or with the reason for a refusal}."""
    layout = source.layout
    if layout is not None and layout not in {module.NAME for module in layouts.modules()}:
        refused = NOTHING | {"reason": f"linears stored as {layout} are not read"}
        return {method: refused for method in methods.available()}
    needs = {"needs": "--allow-requantize" if layout else None}
    question = replace(question, seqlen=min(question.seqlen, source.settings.context or question.seqlen))
    return {name: _record(name, source, question) | needs for name in methods.available()}


def seconds(job: Job) -> float | None:
    """Return the time of a prepared job. None: on an accelerator, in several processes, or with options other
    than the default ones and EQUALLY_FAST, where nothing was measured; or of a model that `plan` refuses."""
    execution, options, question = job.plan.execution, job.request.method.options, Question()
    changed = vars(options).items() - vars(type(options)()).items()
    if execution.device != "cpu" or job.plan.ranks > 1 or {name for name, _ in changed} - EQUALLY_FAST:
        return None
    if job.calibration:
        samples, seqlen = job.calibration.tokens.shape
        question = replace(question, samples=samples, seqlen=seqlen)
    try:
        model = source.read(str(job.checkpoint.folder))
    except QuantkitError:
        return None
    asked = replace(question, threads=execution.threads)
    return _record(job.method.name, model, asked, execution.dtype)["seconds"]


def python_bytes(vocabulary: int, gguf: bool) -> int:
    """Return the bytes of Python, its libraries and the tokenizer, which a GGUF file holds in its header."""
    return INTERPRETER_BYTES + (2 if gguf else 1) * TOKEN_BYTES * vocabulary


def _record(method: str, source: Source, question: Question, dtype: str | None = None) -> dict[str, Any]:
    """Return the needs of a job with default options that computes in `dtype`; None: in the usual one."""
    parameters, device = source.parameters, question.single_device
    on_gpu, chosen = device is not None and device.kind == "cuda", methods.create(method)
    work = chosen.work
    try:
        weights = formats.weights(chosen.stored_as, parameters)
    except Unsupported as error:
        return NOTHING | {"reason": str(error)}
    output_bytes = weights.bytes + _widened(chosen, source)
    if dtype is None:
        dtype = compute_dtype("float32" if parameters.quantized else source.settings.stored_dtype, on_gpu)
    memory = device.memory_bytes if device else room().nbytes
    python = python_bytes(source.settings.filled("vocab_size") or 0, source.basis == GGUF)
    interpreter = 0 if on_gpu else python
    memory = memory and max(0, memory - interpreter)
    size = partial(_execution, work, source, DTYPE_BYTES[dtype], memory, on_gpu)
    execution, need = size(question)
    fits = None if memory is None else need.computing <= memory
    seconds, factor, basis = _seconds(work, source, question, dtype, execution)
    remedy = _remedy(size, question, memory, interpreter) if fits is False and work.sample else None
    return {
        "peak_memory_bytes": need.computing + interpreter,
        "above_interpreter_bytes": need.computing,
        "host_memory_bytes": need.host + python,
        "fits": fits,
        "device": device.name if on_gpu else "cpu",
        "dtype": dtype,
        **execution,
        "calibration_tokens": question.samples * question.seqlen if work.sample else 0,
        "disk_bytes": weights.packed_bytes + output_bytes,  # staged blocks and the finished files
        "output_bytes": output_bytes,
        "seconds": seconds,
        "seconds_factor": factor,
        "basis": basis,
        "remedy": remedy,
    }


def _widened(method: Method, source: Source) -> int:
    """Return by how many bytes a folder made of a GGUF file exceeds one made of the original in 16 bit: the
    values of quantized tensors outside the blocks are stored in float32."""
    if source.layout != "gguf" or method.stored_as in formats.FILE_TYPES:
        return 0
    return sum(2 * tensor.size for tensor in source.parameters.outside if tensor.stored_nbytes is not None)


def _execution(
    work: Work, source: Source, element: int, memory: int | None, on_gpu: bool, question: Question
) -> tuple[dict[str, str | None], Peak]:
    """Return the execution that a job would choose (`plan.decide`), and its peak memory: the fastest that
    fits comfortably, else the one with the least memory. memory: None if unknown."""
    shapes = _shapes(source, question, element, memory, on_gpu)
    if vocabulary := source.settings.filled("vocab_size"):
        predicted = 4 * vocabulary * loss_tokens(None, work.sample > 0, vocabulary)
        shapes = replace(shapes, predicted=predicted)
    drift = {Statistic.DRIFT} if work.feeds_back else set()
    needs = {Statistic.HESSIAN} | drift if work.sample else frozenset()

    def peak(suspend: bool, states: str, at_once: int = 1) -> Peak:
        run = suspend, states, on_gpu, at_once
        return peak_memory(
            Stages(shapes, needs, work.sample, work.outside, *run, work.feeds_back, work.whole_rows)
        )

    executions = [
        (suspend, states)
        for suspend in ((True, False) if work.feeds_back and not on_gpu else (False,))
        for states in ("device", *["host"] * on_gpu, *["disk"] * (not suspend))
    ]
    executions = executions if needs else [(False, "device")]
    fitting = (e for e in executions if memory is None or peak(*e).computing <= COMFORT * memory)
    suspend, states = next(fitting, None) or min(executions, key=lambda e: peak(*e).computing)
    need = peak(suspend, states)
    if work.feeds_back and not suspend and memory is not None:
        need = peak(suspend, states, sites_at_once(shapes, memory, need))
    sequential = ("suspend" if suspend else "repeat") if work.feeds_back and not on_gpu else None
    return {"sequential": sequential, "states": states if needs else None}, need


def _remedy(size: Any, question: Question, memory: int, interpreter: int) -> dict[str, Any] | None:
    """Halve the number of calibration sequences until the job fits. Return the flags and the peak, with the
    bytes of the interpreter; None if one sequence is too much. size: `_execution` of a question."""
    samples = question.samples // 2
    while samples:
        execution, need = size(replace(question, samples=samples))
        if need.computing <= memory:
            flags = {"samples": samples} | execution
            return {"flags": typed(flags), "peak_memory_bytes": need.computing + interpreter}
        samples //= 2
    return None


def typed(flags: dict[str, Any]) -> str:
    """Return flags as a user types them, without those of usual values."""
    return " ".join(f"--{name} {value}" for name, value in flags.items() if value not in USUAL)


def _seconds(
    work: Work, source: Source, question: Question, dtype: str, execution: dict[str, str | None]
) -> tuple[float | None, float | None, str]:
    """Return (time, factor, basis): the time is right within the factor. If nothing was measured, None for
    both, and the reason."""
    parameters, device = source.parameters, question.single_device
    if device is None or device.kind == "cpu":
        threads = question.cpu_threads
        tokens = question.samples * question.seqlen if work.sample else 0
        model = model_of(source, speed.of_machine(dtype).with_threads(threads))
        suspend = execution["sequential"] != "repeat"
        basis = f"a benchmark of this machine with {count(threads, 'thread')}"
        return model.job(work, tokens, suspend), duration.FACTOR, basis
    if not device.name.startswith(LIKE_H200) or not work.h200_seconds or not device.tflops:
        return None, None, "unknown on this device: no such job was measured on it"
    slower = H200_TFLOPS / device.tflops * (MIXTURE if any(t.is_expert for t in parameters.linears) else 1)
    weights = sum(tensor.size for tensor in parameters.linears)
    seconds = duration.START + slower * work.h200_seconds * weights / 1e9
    if device.name.startswith("h200"):
        return seconds, duration.FACTOR, MEASURED
    return seconds, SCALED, f"{MEASURED}, scaled by FLOPS"


def _shapes(source: Source, question: Question, element: int, memory: int | None, on_gpu: bool) -> Shapes:
    """Return the shapes of a job. element: bytes per value. Experts larger than a share of an accelerator's
    memory are streamed."""
    outside, samples, seqlen = source.parameters.outside, question.samples, question.seqlen
    named = [(tensor, tensor.local.removesuffix(".weight")) for tensor in source.parameters.linears]
    most = tokens_at_once(on_gpu, source.settings.hidden or 0, any(tensor.is_expert for tensor, _ in named))
    shapes = of_largest_block(
        ((tensor.block, (name, tensor.out_features, tensor.in_features)) for tensor, name in named),
        lambda block: [name for tensor, name in named if tensor.block == block and tensor.is_expert],
        rest=sum(tensor.size for tensor in outside),
        largest=max((tensor.nbytes for tensor in outside), default=0),
        by_rows=sum(tensor.size for tensor in outside if _of_vocabulary(tensor, source)),
        element=element,
        tokens=samples * seqlen,
        batch_tokens=min(max(1, most // seqlen), samples) * seqlen,
        width=source.settings.hidden,
    )
    if not shapes.experts:
        return shapes
    routed = sum(out * width for name, out, width in shapes.linears if name in shapes.experts)
    active = source.settings.filled(*expert_share.ROUTED) or 1
    return replace(
        shapes, streamed=expert_share.streams(element * routed, memory if on_gpu else None), active=active
    )


def _of_vocabulary(tensor: Tensor, source: Source) -> bool:
    """Return whether a tensor is embedding or head, stored as floats or in ggml blocks."""
    rows, packed = tensor.shape[0], tensor.stored_nbytes is not None and source.layout != "gguf"
    fits = len(tensor.shape) == 2 and rows == source.settings.filled("vocab_size")
    return fits and not packed and not TABLES.search(tensor.name)


def compute_dtype(stored: str, on_gpu: bool) -> str:
    """Return the dtype of forward passes: the stored one if the hardware supports it, else float32."""
    if on_gpu:
        return stored
    return "bfloat16" if stored == "bfloat16" and processor.has_bfloat16() else "float32"
