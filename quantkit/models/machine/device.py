"""The device that computes: choice, precision, free memory, and copies to it.

All calls to a device are made here. Its torch module (`torch.cuda`, `torch.xpu`, `torch.mps`) is found by
name, so one code path serves all devices.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from subprocess import CalledProcessError
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from quantkit.errors import UNSUPPORTED, QuantkitError, first_line
from quantkit.models.machine import memory, processor
from quantkit.options import unknown_device

T = TypeVar("T")
WIDENED = 4096  # rows of a weight, such as the head's, that are in float32 at a time
fallbacks: list[str] = []  # what the current job does without on its device; its reports say so


def fall_back(what: str, error: Exception) -> None:
    """Note that the device lacks something, and the error that shows it."""
    note = f"error feedback takes longer without {what}: {first_line(error)}"
    if note not in fallbacks:
        fallbacks.append(note)


def triton_kernel(device: torch.device, load: Callable[[torch.device], T]) -> T | None:
    """Return the kernel that `load` imports and tries on a CUDA device, once in a process; None, noted, if
    Triton is absent or cannot compile it."""
    kernel = _tried(device, load)
    if isinstance(kernel, Exception):
        fall_back("the Triton kernel", kernel)
        return None
    return kernel


@cache
def _tried(device: torch.device, load: Callable[[torch.device], T]) -> T | Exception:
    try:
        from triton.errors import TritonError
    except ImportError as error:
        return error
    try:
        return load(device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError, CalledProcessError, TritonError) as error:  # most often: no C compiler
        return error


def graph_pool(device: torch.device) -> Any:
    """Return memory that CUDA graphs share, of which only one runs at a time; None on other devices."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def record_graph(function: Callable[[], T], pool: Any) -> tuple[T, Any] | None:
    """Return what `function` returns and a CUDA graph of its launches; None, noted, if it cannot be recorded.
    The result is valid after each `replay()` of the graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            return function(), graph
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch.cuda.set_stream(stream)  # after an error, torch stays on the stream of the recording
        fall_back("CUDA graphs", error)
        return None


def choose_device(requested: str) -> torch.device:
    """Return the requested device; `auto` is cuda if available, else cpu.

    Also makes it torch's current device, and switches off TF32 for float32 matrix products: Hessians and
    their factors need more than its 10 bits.

    Raises QuantkitError for an invalid device (exit code 2) or an unavailable one (4).
    """
    torch.set_float32_matmul_precision("highest")
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise unknown_device(requested) from error
    if device.type == "cpu":
        return torch.device("cpu")
    try:
        if not getattr(torch, device.type).is_available():  # AttributeError: torch has no such module
            raise RuntimeError(f"torch {torch.__version__} finds none")
        torch.empty(1, device=device)
        if device.index is not None:  # graphs and kernels run on the current device
            torch.get_device_module(device).set_device(device)
    except (RuntimeError, AssertionError, AttributeError) as error:
        why = "nothing computes there" if isinstance(error, AttributeError) else first_line(error)
        what = f"device {requested!r} is not available: {why}"
        hint = "quantkit doctor lists devices; use --device cpu, or a torch that is built for this device"
        raise QuantkitError(what, hint, UNSUPPORTED) from error
    return device


def choose_dtype(requested: str, stored: str, device: torch.device) -> str:
    """Return the requested dtype; `auto`: the checkpoint's 16 bit if the hardware has it, else float32.

    stored: safetensors' name of the dtype of the linears, such as `BF16`.
    """
    if requested != "auto":
        return requested
    if is_accelerator(device):
        return {"F16": "float16", "BF16": "bfloat16"}.get(stored, "float32")
    return "bfloat16" if stored == "BF16" and processor.has_bfloat16() else "float32"


def machine_of(device: torch.device) -> str:
    """Return the kind of machine on which a job on this device gives the same bytes: the name of the
    accelerator, or that of the processor and the instructions that torch uses."""
    if is_accelerator(device) and hasattr(backend := getattr(torch, device.type), "get_device_name"):
        return backend.get_device_name(device)
    return f"{processor.name()} ({torch.backends.cpu.get_cpu_capability()})"


def is_accelerator(device: torch.device) -> bool:
    """Return whether the device has its own memory and runs work asynchronously."""
    return device.type not in ("cpu", "meta")


def widens(device: torch.device) -> bool:
    """Return whether torch multiplies 16-bit matrices with a float32 result on the device. Products are
    exact, and tensor cores compute them."""
    has, key = torch._C._dispatch_has_kernel_for_dispatch_key, torch._C._dispatch_key_for_device(device.type)
    return hasattr(torch.ops.aten.mm, "dtype") and has("aten::mm.dtype", key)  # from torch 2.8 on


def narrow_products(values: Tensor) -> AbstractContextManager:
    """Let a CPU with bfloat16 instructions multiply float32 matrices in bfloat16, with float32 sums, if
    `values` are bfloat16. This is exact for matrices of bfloat16 values. For accelerators see `widens`."""
    narrow = values.is_cpu and values.dtype == torch.bfloat16 and processor.has_bfloat16()
    return _precision("medium" if narrow else None)


class _Widened(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), options=None):
        if function is not linear or options or arguments[0].dtype != torch.bfloat16:
            return function(*arguments, **options or {})
        inputs, *rows = (tensor for tensor in arguments if tensor is not None)
        inputs, parts = inputs.float(), zip(*(tensor.split(WIDENED) for tensor in rows), strict=True)
        outputs = (linear(inputs, *(tensor.float() for tensor in part)).bfloat16() for part in parts)
        return torch.cat(list(outputs), -1)


def bfloat16_linears(dtype: torch.dtype, device: torch.device) -> AbstractContextManager:
    """Compute linears of bfloat16 on a CPU without bfloat16 instructions in float32, and round the outputs.
    torch does the same, up to the order of sums, but takes six times as long."""
    emulated = dtype == torch.bfloat16 and device.type == "cpu" and not processor.has_bfloat16()
    return _Widened() if emulated else nullcontext()


def tf32_products(device: torch.device) -> AbstractContextManager:
    """Let a CUDA device round the operands of float32 products to TF32's 11 bits, with float32 sums."""
    return _precision("high" if device.type == "cuda" else None)


@contextmanager
def _precision(precision: str | None) -> Iterator[None]:
    """Set torch's precision of float32 products; None changes nothing."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision or before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of the device; for the CPU, those that `memory.room` leaves."""
    if not is_accelerator(device):
        return memory.room().nbytes
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        reusable = getattr(module, "memory_reserved", lambda device: 0)(device)
        reusable -= getattr(module, "memory_allocated", lambda device: 0)(device)
        return module.mem_get_info(device)[0] + max(0, reusable)
    return module.recommended_max_memory() - module.driver_allocated_memory()  # mps


def accelerators() -> Iterator[tuple[str, str, int, int]]:
    """Yield for every accelerator its name in `--device`, the maker's name, and free and total bytes."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return
    module = torch.get_device_module(kind)
    for index in range(module.device_count()):
        device = torch.device(kind.type, index)
        reports = hasattr(module, "mem_get_info")
        total = module.mem_get_info(device)[1] if reports else module.recommended_max_memory()
        yield str(device), getattr(module, "get_device_name", str)(device), free_memory(device), total


def synchronize(device: torch.device) -> None:
    """Wait until this device has finished all its work."""
    if is_accelerator(device):
        module = torch.get_device_module(device)
        module.synchronize() if device.type == "mps" else module.synchronize(device)


def give_back(device: torch.device) -> None:
    """Return torch's cached memory of the device to the system."""
    if is_accelerator(device):
        torch.get_device_module(device).empty_cache()


def host_buffer(like: Tensor) -> Tensor:
    """Return an empty host tensor of the same shape and dtype, pinned for CUDA: copies are faster."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


def to_host(tensor: Tensor, wait: bool = True) -> Tensor:
    """Return a tensor in host memory. From an accelerator it is copied to pinned memory, which is ten times
    as fast. wait: False if only work that is queued later on the accelerator reads it."""
    return tensor if tensor.is_cpu else host_buffer(tensor).copy_(tensor, non_blocking=not wait)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor, pinned if that lets copies to the device overlap with other work."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


class Lane:
    """Copies from the host to a device that overlap with the device's work if it has streams."""

    def __init__(self, device: torch.device):
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device) if hasattr(self._module, "Stream") else None

    def send(self, host: Tensor) -> Tensor:
        """Start a copy after all work queued so far. Call `receive` before the result is used."""
        if self._stream:
            self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream) if self._stream else nullcontext():
            return host.to(self._device, non_blocking=True)

    def receive(self, sent: Tensor) -> Tensor:
        """Return the tensor that `send` returned; work queued from now on waits for the copy."""
        if self._stream:
            current = self._module.current_stream(self._device)
            current.wait_stream(self._stream)
            sent.record_stream(current)  # keeps the memory until work queued on this stream is done
        return sent
