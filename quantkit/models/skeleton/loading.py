"""Load tensors of the checkpoint, in the model's dtype, into blocks, and remove them again."""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.errors import DamagedError, require
from quantkit.grids.grid import is_finite
from quantkit.layouts import Layout, naming_errors
from quantkit.models.files.checkpoint import Checkpoint, PackedLinear
from quantkit.models.machine import processor
from quantkit.models.machine.device import is_accelerator, pinned
from quantkit.models.machine.memory import return_freed_pages
from quantkit.models.skeleton.names import Names

READERS = 4  # threads that read a block for an accelerator


@dataclass(frozen=True)
class FetchedBlock:
    """A block in host memory. tensors: by name in the block. packed: stored tensors of each packed linear, by
    the name of its weight in the block."""

    tensors: dict[str, Tensor]
    packed: dict[str, PackedLinear]


@dataclass(frozen=True)
class Loader:
    """Loads tensors from `checkpoint` into a model that computes in `dtype` on `device`."""

    names: Names
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device

    def read(self, name: str, expected: Tensor) -> Tensor:
        """Return the values of the model's tensor `name`; Conv1D weights are transposed to `[out, in]`.

        Raises QuantkitError unless they have the shape of `expected` and are finite.
        """
        if name in self.names.joined:
            parts = [self.checkpoint.read(part, self.dtype) for part in self.names.joined[name]]
            return checked(torch.cat(parts), expected.shape, name)
        stored = self.names.stored[name]
        tensor = self.checkpoint.read(stored, self.dtype if expected.is_floating_point() else None)
        if name in self.names.transposed and not self.checkpoint.is_quantized(stored):
            tensor = tensor.t().contiguous()
        return checked(tensor, expected.shape, stored)

    def rows(self, name: str, expected: Tensor, rows: slice) -> Tensor:
        """Return some rows of the model's matrix `name`; errors as in `read`."""
        stored = self.names.stored[name]
        shape = rows.stop - rows.start, *expected.shape[1:]
        return checked(self.checkpoint.load(stored, self.dtype, rows), shape, stored)

    def block(
        self, index: int, block: nn.Module, decoded: bool, names: Collection[str] | None = None
    ) -> FetchedBlock:
        """Read the parameters of block `index`. names: of these only, inside the block. Packed linears stay
        packed unless `decoded`."""
        expected = _state(block, names)
        full = {name: self.names.of_block(index, name) for name in expected}
        stored = {name: self.names.stored[f] for name, f in full.items() if f in self.names.stored}
        linears = {f"{n}.weight" for n, module in block.named_modules() if isinstance(module, nn.Linear)}
        coded = {n for n in linears & stored.keys() if self.checkpoint.is_quantized(stored[n])}
        coded = set() if decoded else coded
        order = sorted(expected, key=lambda name: self.offset(full[name]))
        plain = [n for n in order if (n in stored and n not in coded) or full[n] in self.names.joined]
        fetch = lambda name: pinned(self.read(full[name], expected[name]), self.device)  # noqa: E731
        if is_accelerator(self.device):  # which computes faster than one core reads, checks and pins
            with ThreadPoolExecutor(READERS) as pool:
                fetched = list(pool.map(fetch, plain))
        else:
            fetched = map(fetch, plain)
        tensors = dict(zip(plain, fetched, strict=True))
        packed = {name: self.checkpoint.parts(stored[name]) for name in order if name in coded}
        for parts in packed.values():
            parts.update({part: pinned(tensor, self.device) for part, tensor in parts.items()})
        return FetchedBlock(tensors, packed)

    def offset(self, name: str) -> tuple[str, int]:
        """Return file and offset of the model's tensor `name`: a sort key for reading sequentially."""
        names = self.names.joined.get(name) or filter(None, [self.names.stored.get(name)])
        parts = [part for stored in names for part in self.checkpoint.stored_as(stored)]
        infos = [self.checkpoint.infos[part] for part in parts if part in self.checkpoint.infos]
        return min(((str(info.file), info.offset) for info in infos), default=("", 0))

    def load(self, block: nn.Module, fetched: FetchedBlock) -> None:
        """Put all tensors of `fetched`, which were read from `checkpoint`, into the block."""
        state = {name: tensor.to(self.device, non_blocking=True) for name, tensor in fetched.tensors.items()}
        block.load_state_dict(state, strict=False, assign=True)
        block.requires_grad_(False)
        for name, parts in fetched.packed.items():
            with naming_errors(parts.linear, parts):
                local = name.removesuffix(".weight")
                self.install(block, local, self.checkpoint.layout, self.placed(parts), parts.linear)

    def placed(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move the tensors of a dict to the device, in place, and return the dict."""
        for part, tensor in parts.items():
            parts[part] = tensor.to(self.device)
        return parts

    def install(
        self, block: nn.Module, local: str, layout: Layout, parts: dict[str, Tensor], stored: str,
        decoded: bool = False,
    ) -> Tensor:  # fmt: skip
        """Make a linear compute with packed parts, and return its decoded weight; see `Skeleton.install`.
        stored: name of the linear in the checkpoint."""
        linear, layout = _restored(block, local), layout.at(stored)
        values = layout.values(parts).to(self.dtype)
        values = checked(values, linear.weight.shape, f"{stored}.weight").to(self.device)
        products = processor.has_int8_products()
        module = None if decoded else layout.module(parts, linear.bias, values, products)
        if module is None:
            linear.weight = nn.Parameter(values, requires_grad=False)
        else:
            module.__dict__["replaced"] = linear  # not a child: it has no part in the computation
            block.set_submodule(local, module.to(self.device))
        return values


def give_up(block: nn.Module, local: str) -> None:
    """Release one linear: the original module returns to its place, with parameters on meta."""
    linear = _restored(block, local)
    for name, parameter in list(linear.named_parameters(recurse=False)):
        setattr(linear, name, nn.Parameter(parameter.to("meta"), requires_grad=False))


def free(block: nn.Module) -> None:
    """Release a block's memory to the system; its parameters return to the meta device."""
    for local in [name for name, module in block.named_modules() if "replaced" in vars(module)]:
        _restored(block, local)
    state = {name: parameter.to("meta") for name, parameter in block.named_parameters()}
    block.load_state_dict(state, strict=False, assign=True)
    return_freed_pages()


def _restored(block: nn.Module, local: str) -> nn.Module:
    """Put a linear back in the place of a layout's module, if there is one, and return the linear."""
    module = block.get_submodule(local)
    if "replaced" in vars(module):
        block.set_submodule(local, vars(module)["replaced"])
    return block.get_submodule(local)


def _state(block: nn.Module, names: Collection[str] | None) -> dict[str, Tensor]:
    """Return parameters and buffers by name, or only `names`, because all take long in a mixture."""
    if names is None:
        return block.state_dict(keep_vars=True)  # no views: this may be the reading thread
    split = ((name, *name.rpartition(".")[::2]) for name in names)
    return {name: getattr(block.get_submodule(owner), leaf) for name, owner, leaf in split}


def checked(tensor: Tensor, shape: Sequence[int], stored: str) -> Tensor:
    """Return the tensor itself. Raises QuantkitError unless it has this shape and is finite."""
    what = f"{stored} is {list(tensor.shape)}, the configuration says {list(shape)}"
    require(tuple(tensor.shape) == tuple(shape), what, "config.json and weights belong to different models")
    if tensor.is_floating_point() and not is_finite(tensor):
        raise DamagedError(
            f"{stored} holds NaN or infinite values in {str(tensor.dtype).removeprefix('torch.')}",
            hint="the checkpoint is damaged"
            + (", or its weights overflow: try --dtype float32" if tensor.dtype == torch.float16 else ""),
        )
    return tensor
