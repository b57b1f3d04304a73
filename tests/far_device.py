"""A double of an accelerator, in pure Python: what would fail on a GPU fails here, on a machine without one.

Tensors of device `far` hold a CPU tensor inside and compute with it, so values are the CPU's. As on a GPU:

- an operation that mixes them with CPU tensors of one or more dimensions raises, and so does `numpy()`;
- memory is limited: `DEVICE.limit` bytes, then `torch.OutOfMemoryError`; `DEVICE.peak` was the most;
- copies that do not block are done when somebody waits for them, not before: until then the host sees NaN;
- streams know of each other's work only if they wait for it: touching what another stream has not finished
  raises. One stream's work is in order.

`DEVICE.launches` counts the operations that start a kernel (views, metadata and empty tensors do not) and,
as `from host`, copies to the device; `DEVICE.syncs` those for whose result the host has to wait.
`DEVICE.float64 = False` refuses double precision, as Apple's mps does; `DEVICE.streams = False` has no
streams, as mps has none; `DEVICE.strict_products` refuses products of matrices that torch may round to TF32.

Not proven by it: generators on the device, backward passes, torch.compile, several devices, what a kernel
computes. Written for torch 2.13 (`_setup_privateuseone_for_python_backend` is experimental).

    python tests/far_device.py gptq MODEL …     runs the command with --device far and prints the counts
"""

from __future__ import annotations

import collections
import itertools
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils import backend_registration

FAR = torch.device("cpu")  # until the backend has its name, below
HOST_WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "item")
NO_KERNEL = ("empty", "_to_copy", "detach", "alias", "lift_fresh", "record_stream", "resize", "set_")
PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "mv",
    "addmv",
    "matmul",
    "linear",
    "cholesky",
    "solve_triangular",
)


class Stream:
    """A queue of work: how much it has done, and how much of every other stream's it has waited for."""

    def __init__(self, device=None):
        self.done = 0
        self.known: dict[Stream, int] = {}

    def wait_stream(self, other: Stream) -> None:
        self.known[other] = other.done
        for stream, done in other.known.items():
            self.known[stream] = max(done, self.known.get(stream, 0))

    def knows(self, stream: Stream, done: int) -> bool:
        return stream is self or self.known.get(stream, 0) >= done

    def synchronize(self) -> None:
        DEVICE.arrive(self)


class Memory:
    """One allocation on the device: who wrote it last and who read it since, on which stream."""

    def __init__(self, nbytes: int, stream: Stream):
        self.nbytes = nbytes
        self.owner = stream
        self.users = {stream}
        self.written = (stream, stream.done)
        self.read: dict[Stream, int] = {}


class Device:
    """The one device there is."""

    def __init__(self):
        self.main = Stream()
        self.here = False
        self.reset()

    def reset(self) -> None:
        """As new: nothing counted, 64 GiB, streams and float64."""
        self.launches: collections.Counter[str] = collections.Counter()
        self.syncs: collections.Counter[str] = collections.Counter()
        self.free: int | None = None  # what `mem_get_info` says is free, where that is not the truth
        self.limit, self.float64, self.streams, self.strict_products = 64 << 30, True, True, False
        self.stream = self.main
        self.memory: dict[int, Memory] = {}
        self.holders: dict[int, int] = {}
        self.used = self.peak = 0
        self.arriving: list[tuple[Tensor, Tensor, Stream]] = []  # host buffer, its content, whose copy

    def hold(self, inner: Tensor) -> int:
        """Another tensor lies in this memory."""
        storage = inner.untyped_storage()
        place = storage.data_ptr()
        if place in self.holders:
            self.holders[place] += 1
        elif nbytes := storage.nbytes():
            if self.used + nbytes > self.limit:
                raise torch.OutOfMemoryError(
                    f"far: out of memory, {self.used} of {self.limit} bytes are in use"
                )
            self.memory[place] = Memory(nbytes, self.stream)
            self.used += nbytes
            self.peak = max(self.peak, self.used)
            self.holders[place] = 1
        else:
            return 0
        return place

    def release(self, place: int) -> None:
        """A tensor is gone; the memory with the last one."""
        if place not in self.holders:
            return  # of a time before `reset`
        self.holders[place] -= 1
        if not self.holders[place]:
            del self.holders[place]
            self.used -= self.memory.pop(place).nbytes

    def touch(self, tensor: Far, writes: bool) -> None:
        """Raise unless the present stream may read, or write, this tensor now."""
        memory = self.memory.get(tensor.lease.place)
        if memory is None:
            return
        stream = self.stream
        if not stream.knows(*memory.written):
            raise RuntimeError("a stream uses what another one has not finished writing: wait_stream first")
        if stream not in memory.users:
            raise RuntimeError(
                "memory of one stream is used on another, which may reuse it: record_stream first"
            )
        if writes:
            if not all(stream.knows(*reader) for reader in memory.read.items()):
                raise RuntimeError("a stream overwrites what another one may still read: wait_stream first")
            memory.written, memory.read = (stream, stream.done + 1), {}
        else:
            memory.read[stream] = stream.done + 1

    def depart(self, host: Tensor, content: Tensor) -> None:
        """A copy to the host that nobody waits for."""
        if host.is_floating_point():
            host.fill_(torch.nan)
        self.arriving.append((host, content.clone(), self.stream))

    def arrive(self, *streams: Stream) -> None:
        """Copies to the host are done: those of some streams, or all."""
        left = []
        for host, content, stream in self.arriving:
            if streams and stream not in streams:
                left.append((host, content, stream))
            else:
                host.copy_(content)
        self.arriving = left

    def read_host(self, host: Tensor) -> None:
        """The present stream reads a host buffer: copies to it must come before in the stream's order."""
        place = host.untyped_storage().data_ptr()
        for buffer, _, stream in self.arriving:
            if buffer.untyped_storage().data_ptr() == place and not self.stream.knows(stream, stream.done):
                raise RuntimeError(
                    "a stream reads a host buffer that another one has not filled: wait_stream first"
                )
        if any(buffer.untyped_storage().data_ptr() == place for buffer, *_ in self.arriving):
            self.arrive()


DEVICE = Device()


class Lease:
    """Holds memory for as long as a tensor lives. No weak reference: `swap_tensors` refuses those."""

    place = 0

    def __init__(self, inner: Tensor):
        self.place = DEVICE.hold(inner)

    def __del__(self, device: Device = DEVICE):
        device.release(self.place)


class Far(Tensor):
    """A tensor of the device; `inner` has its values."""

    inner: Tensor
    lease: Lease

    def __repr__(self):
        return f"Far({self.inner!r})"

    def __format__(self, spec):
        return format(self.inner, spec)

    def __deepcopy__(self, memo):
        """There is no storage to copy, which is what torch would do."""
        return memo.setdefault(id(self), self.clone())

    def data_ptr(self):
        return self.inner.data_ptr()

    def tolist(self):
        DEVICE.syncs["tolist"] += 1
        DEVICE.arrive()
        return self.inner.tolist()

    def numpy(self, *, force=False):
        raise TypeError("can't convert far:0 device type tensor to numpy")

    def record_stream(self, stream: Stream) -> None:
        if self.lease.place in DEVICE.memory:
            DEVICE.memory[self.lease.place].users.add(stream)

    def pin_memory(self, device=None):
        raise RuntimeError("only tensors of the host can be pinned")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        op = OPERATIONS.get(id(func)) or _learn(func)
        kwargs = kwargs or {}
        if op.instead is not None:
            return op.instead(*args, **kwargs)
        if DEVICE.strict_products and op.product:
            assert torch.get_float32_matmul_precision() == "highest", f"{op.name} may round to TF32"
        read: list[Far] = []
        inside = [_inside(value, read) for value in args]
        named = {key: _inside(value, read) for key, value in kwargs.items()}
        written: list[Far] = []
        for place, argument in op.written:
            _inside(kwargs.get(argument, args[place] if place < len(args) else None), written)
        for tensor in read:
            DEVICE.touch(tensor, any(tensor is other for other in written))
        shapes = [tensor.inner.shape for tensor in written]
        if op.base == "sqrt":  # torch's on a CPU is not correctly rounded, a GPU's is
            out = torch.sqrt(inside[0].double()).to(inside[0].dtype)
        else:
            out = func(*inside, **named)
        if op.waits:
            DEVICE.syncs[op.base] += 1
            DEVICE.arrive()
        if op.launches:
            launch(op.base)
        if written:
            assert shapes == [tensor.inner.shape for tensor in written], f"{op.name} resized its output"
            return written[0] if len(written) == 1 else tuple(written)
        if isinstance(out, (tuple, list)):
            return type(out)(_far(x) if isinstance(x, Tensor) else x for x in out)
        return _far(out) if isinstance(out, Tensor) else out


def _far(inner: Tensor) -> Far:
    """A tensor of the device around one of the CPU."""
    if not DEVICE.float64 and inner.dtype in (torch.float64, torch.complex128):
        raise TypeError("this device has no float64")
    lease = Lease(inner)
    with torch.inference_mode(False):  # a view in inference mode of a tensor from outside is a usual tensor
        made = Tensor._make_wrapper_subclass(
            Far, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, layout=inner.layout, device=FAR,
        )  # fmt: skip
    made.inner, made.lease = inner, lease
    return made


class Operation:
    """What the double has to know of one of torch's operations."""

    def __init__(self, func):
        self.name = func.name().removeprefix("aten::")
        self.base = self.name.partition(".")[0]
        instead = {"_to_copy": _to_copy, "copy_": _copy, "mm.dtype": _mm, "cumsum": _cumsum}
        self.instead = instead.get(self.name)
        if torch.Tag.inplace_view in func.tags:
            raise NotImplementedError(f"{self.name} changes a tensor's shape in place: the double cannot")
        plain = self.base.removeprefix("linalg_").rstrip("_").removesuffix("_ex")
        self.product = plain in PRODUCTS
        aliases = [one.alias_info for one in func._schema.returns]
        view = any(one is not None and not one.is_write for one in aliases)
        self.waits = self.base in HOST_WAITS
        self.launches = not view and not self.base.startswith(NO_KERNEL)
        self.written = [  # the arguments that it writes into
            (place, argument.name)
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]


OPERATIONS: dict[int, Operation] = {}  # by the id of the overload, whose own hash is slow


def _learn(func) -> Operation:
    OPERATIONS[id(func)] = Operation(func)
    return OPERATIONS[id(func)]


def _inside(value, found: list[Far]):
    """What the CPU computes with instead of an argument, whose tensors of the device are added to `found`."""
    if isinstance(value, Far):
        found.append(value)
        return value.inner
    if isinstance(value, (tuple, list)):
        return type(value)(_inside(part, found) for part in value)
    if isinstance(value, Tensor) and value.dim():
        raise RuntimeError(f"expected all tensors on one device, found {FAR} and {value.device}")
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == FAR.type else value


def launch(name: str) -> None:
    DEVICE.launches[name] += 1
    DEVICE.stream.done += 1


def _to_copy(
    tensor, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None
):
    to_far = torch.device(device).type == FAR.type if device is not None else isinstance(tensor, Far)
    if isinstance(tensor, Far):
        DEVICE.touch(tensor, writes=False)
        launch("_to_copy")
        content = torch.ops.aten._to_copy(tensor.inner, dtype=dtype, memory_format=memory_format)
        if to_far:
            return _far(content)
        if non_blocking:
            host = torch.empty_like(content)
            DEVICE.depart(host, content)
            return host
        DEVICE.syncs["to host"] += 1
        DEVICE.arrive()
        return content
    DEVICE.read_host(tensor)
    launch("from host")
    return _far(torch.ops.aten._to_copy(tensor, dtype=dtype, memory_format=memory_format))


def _copy(into, source, non_blocking=False):
    for tensor, writes in ((source, False), (into, True)):
        if isinstance(tensor, Far):
            DEVICE.touch(tensor, writes)
    launch("copy_" if isinstance(source, Far) else "from host")
    if isinstance(into, Far):
        if not isinstance(source, Far):
            DEVICE.read_host(source)
        into.inner.copy_(source.inner if isinstance(source, Far) else source)
    elif non_blocking:
        DEVICE.depart(into, source.inner.to(into.dtype).expand(into.shape))
    else:
        DEVICE.syncs["to host"] += 1
        DEVICE.arrive()
        into.copy_(source.inner)
    return into


def _mm(left, right, out_dtype):
    """A product of 16-bit matrices in float32, which torch has for CUDA only."""
    for tensor in (left, right):
        DEVICE.touch(tensor, writes=False)
    launch("mm")
    return _far(left.inner.to(out_dtype) @ right.inner.to(out_dtype))


def _cumsum(terms, dim, *, dtype=None):
    """Along the first dimension CUDA adds one after another; torch's sums on a CPU are in float64."""
    DEVICE.touch(terms, writes=False)
    launch("cumsum")
    if dim or dtype:
        return _far(terms.inner.cumsum(dim, dtype=dtype))
    return _far(torch.stack(list(itertools.accumulate(terms.inner))))


class _Module(backend_registration._DummyBackendModule):
    """`torch.far`: what torch and quantkit ask a device's module."""

    def is_available(self) -> bool:
        return DEVICE.here

    def device_count(self) -> int:
        return int(DEVICE.here)

    def get_device_name(self, device=None) -> str:
        return "a double of an accelerator"

    def mem_get_info(self, device=None) -> tuple[int, int]:
        free = DEVICE.limit - DEVICE.used if DEVICE.free is None else DEVICE.free
        return free, DEVICE.limit

    def synchronize(self, device=None) -> None:
        DEVICE.syncs["synchronize"] += 1
        DEVICE.arrive()

    def empty_cache(self) -> None: ...

    def current_stream(self, device=None) -> Stream:
        return DEVICE.stream

    __name__ = "far"  # transformers asks

    def __getattr__(self, name: str):
        if name == "Stream" and DEVICE.streams:
            return Stream
        raise AttributeError(name)

    @contextmanager
    def stream(self, stream: Stream):
        before, DEVICE.stream = DEVICE.stream, stream
        try:
            yield
        finally:
            DEVICE.stream = before


class _Hook(backend_registration._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return DEVICE.here


backend_registration._setup_privateuseone_for_python_backend("far", _Module(), _Hook())
FAR = torch.device("far:0")
LIBRARY = torch.library.Library("aten", "IMPL")


def _made(inner: Tensor) -> Far:
    if not DEVICE.here:
        raise RuntimeError("there is none")
    return _far(inner)


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return _made(torch.empty(size, dtype=dtype))


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return _far(torch.empty_strided(size, stride, dtype=dtype))


def _factory(name: str):
    """An operation that makes a tensor out of numbers; torch would resize an empty one, a wrapper cannot."""
    base, _, overload = name.partition(".")
    make = getattr(getattr(torch.ops.aten, base), overload or "default")

    def run(*args, device=None, pin_memory=None, **kwargs):
        launch(base)
        return _far(make(*args, **kwargs, device="cpu"))

    return run


def _attention(*args, **kwargs):
    """One kernel, as on a GPU and on the CPU; torch would take it apart for a backend it does not know."""
    launch("scaled_dot_product_attention")
    inside = {key: _inside(value, []) for key, value in kwargs.items()}
    return _far(
        torch.ops.aten.scaled_dot_product_attention(*(_inside(value, []) for value in args), **inside)
    )


for _name, _function in {
    "scaled_dot_product_attention": _attention,
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_to_copy": _to_copy,
    **{
        name: _factory(name)
        for name in ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace")
    },
}.items():
    LIBRARY.impl(_name, _function, "PrivateUse1")


@contextmanager
def present():
    """The device is there; modules move their parameters by swapping them, as wrappers of tensors have to."""
    swapping = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    DEVICE.reset()
    DEVICE.here = True
    try:
        yield DEVICE
    finally:
        DEVICE.here = False
        torch.__future__.set_swap_module_params_on_conversion(swapping)


if __name__ == "__main__":
    import sys

    from quantkit.cli import main

    sys.argv += ["--device", "far"]
    with present():
        try:
            main()
        finally:
            print(
                f"{DEVICE.launches.total()} launches, {DEVICE.syncs.total()} waits, peak {DEVICE.peak} bytes"
            )
            print(DEVICE.launches.most_common(8), dict(DEVICE.syncs), file=sys.stderr)
