"""The model without its blocks' weights: embeddings, final norm and head are real, blocks come and go.

transformers builds the model on the meta device; the decoder blocks are then replaced by stubs that
return their hidden states and record the arguments they were called with. A block is later run by
itself with what its stub recorded, so masks and rotary embeddings are the model's own, whatever the
architecture. There is no table of architectures: the blocks are the ModuleList as long as the
configuration says the model is deep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quantkit.errors import UNSUPPORTED, QuantkitError, count, name_all
from quantkit.grids.grid import is_finite
from quantkit.layouts import Layout
from quantkit.models import meta_model
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.device import pinned
from quantkit.models.heap import return_freed_pages

TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Call:
    """Arguments of one block for hidden states of one shape, the hidden states left out."""

    args: tuple
    kwargs: dict


@dataclass(frozen=True)
class FetchedBlock:
    """A block in the host's memory. tensors: by name inside the block; parts: of its packed linears, which
    lie in `layout`; stored: their stored names."""

    tensors: dict[str, Tensor]
    parts: dict[str, dict[str, Tensor]]
    stored: dict[str, str]
    layout: Layout | None


class Skeleton:
    """A checkpoint as a model whose decoder blocks are loaded one at a time.

    `blocks[i]` is the real block, on the meta device until `load_block(i)`. All tensors are in `dtype` on
    `device`, except buffers, which keep the precision the architecture gives them. `parameters` counts
    those of the whole model.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device):
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.model = meta_model.build(checkpoint, dtype, device)
        self.blocks_name, container = meta_model.find_blocks(self.model, checkpoint)
        self._transposed = meta_model.replace_conv1d(self.model)
        self._stored = meta_model.resolve_names(self.model, checkpoint.names)
        self.blocks = list(container)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._calls: dict[tuple[int, ...], list[Call]] = {}
        self._replaced: dict[tuple[int, str], nn.Module] = {}  # plain linears whose place `install` gave away
        self._stubs = [_Stub(block) for block in self.blocks]
        for index, stub in enumerate(self._stubs):
            container[index] = stub

    def is_conv1d(self, name: str) -> bool:
        """Whether the model's weight `name` is a Conv1D's, stored `[in, out]`."""
        return name in self._transposed

    def stored_name(self, name: str) -> str:
        """The name under which the model's tensor `name` lies in the checkpoint."""
        return self._stored[name]

    def counts(self) -> Iterator[tuple[str, int]]:
        """Stored name and number of values of every parameter that the checkpoint holds."""
        for index, block in enumerate(self.blocks):
            names = self.block_names(index)
            for local, parameter in block.named_parameters():
                if stored := self._stored.get(names[local]):
                    yield stored, parameter.numel()
        for name, parameter in self.model.named_parameters():
            if stored := self._stored.get(name):
                yield stored, parameter.numel()

    def missing(self) -> list[str]:
        """Parameters of the model that the checkpoint does not hold and no tie provides."""
        tied = self.model.all_tied_weights_keys  # either of two tied names provides the other
        provided = {name for pair in tied.items() if self._stored.keys() & set(pair) for name in pair}
        names = (name for name, _ in self.model.named_parameters(remove_duplicate=False))
        own = {
            f"{self.blocks_name}.{i}.{n}" for i, b in enumerate(self.blocks) for n, _ in b.named_parameters()
        }
        provided |= self._stored.keys() | tied.keys()
        return sorted(own.union(names) - provided)

    def misshapen(self) -> list[str]:
        """What is wrong with the shapes of stored tensors, from headers alone. Those of packed linears are
        known once they are decoded."""
        found = []
        for name, parameter in self.named_parameters():
            stored = self._stored.get(name)
            if stored is None or self.checkpoint.is_quantized(stored):
                continue
            shape, wanted = list(self.checkpoint.infos[stored].shape), list(parameter.shape)
            shape = shape[::-1] if name in self._transposed else shape
            if shape != wanted:
                found.append(f"{stored} is {shape}, the configuration says {wanted}")
        return found

    def read(self, name: str, expected: Tensor, checkpoint: Checkpoint | None = None) -> Tensor:
        """Values of the model's tensor `name` on the host, as it computes with them; Conv1D weights are
        `[out, in]`.

        Raises QuantkitError unless they have the shape of `expected` and are finite.
        """
        checkpoint = checkpoint or self.checkpoint
        stored = self._stored[name]
        tensor = checkpoint.read(stored, self.dtype if expected.is_floating_point() else None)
        if name in self._transposed and not checkpoint.is_quantized(stored):
            tensor = tensor.t().contiguous()
        return checked(tensor, expected.shape, stored)

    def load_rest(self) -> None:
        """Load everything outside the blocks; tied tensors stay one tensor, unless they are stored unlike."""
        state = {
            name: self.read(name, tensor).to(self.device)
            for name, tensor in self.model.state_dict().items()
            if name in self._stored and not name.startswith(self.blocks_name + ".")
        }
        self.model.load_state_dict(state, strict=False, assign=True)
        missing = {name for name in self.model.state_dict() if name not in self._stored}
        self.model.tie_weights(missing_keys=missing, recompute_mapping=False)
        self.model.requires_grad_(False)
        self._learn_return_type()
        self._refuse_further_inputs()

    def free_rest(self) -> None:
        """Give the memory of what lies outside the blocks back; the skeleton is of no use after that."""
        self.model.to("meta")

    def _refuse_further_inputs(self) -> None:
        """Recorded arguments serve all tokens of their shape; refuse blocks that are given more than that."""
        ids = torch.arange(8, device=self.device).view(2, 1, 4)
        (hidden, calls), (_, others) = (self._record(row) for row in ids)
        if hidden.ndim == 3 and all(_same(a, b) for a, b in zip(calls, others, strict=True)):
            return
        raise QuantkitError(
            f"the blocks of {type(self.model).__name__} read more than one stream of hidden states",
            hint="quantkit does not compress this architecture yet",
            exit_code=UNSUPPORTED,
        )

    def _learn_return_type(self) -> None:
        """Whether blocks return a tensor or a tuple: whichever lets the hidden states pass unchanged."""
        for returns_tuple in (False, True):
            try:
                if self._passes_unchanged(returns_tuple):
                    return
            except (TypeError, ValueError, AttributeError, RuntimeError, IndexError):
                if returns_tuple:  # neither way works: the model's own error says most
                    raise
        raise QuantkitError(
            f"{type(self.model).__name__} passes its hidden states from block to block in an unknown way",
            hint="quantkit does not compress this architecture yet",
            exit_code=UNSUPPORTED,
        )

    def _passes_unchanged(self, returns_tuple: bool) -> bool:
        ids = torch.zeros(1, 4, dtype=torch.long, device=self.device)
        shapes = set()
        for stub in self._stubs:
            stub.returns_tuple = returns_tuple
            stub.record = lambda hidden, call: shapes.add(hidden.shape)
        try:
            logits = self._run(ids).logits
        finally:
            for stub in self._stubs:
                stub.record = None
        return len(shapes) == 1 and logits.shape[:2] == ids.shape

    def _run(self, ids: Tensor):
        with torch.no_grad():
            return self.model(ids, use_cache=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states `[batch, tokens, hidden]` that enter block 0, for `ids [batch, tokens]`.

        The arguments of every block are recorded for this shape.
        """
        hidden, calls = self._record(ids)
        self._calls.setdefault(tuple(ids.shape), calls)
        return hidden

    def _record(self, ids: Tensor) -> tuple[Tensor, list[Call]]:
        """Hidden states that enter block 0, and the arguments of every block."""
        calls: list[Call] = []
        entry: list[Tensor] = []

        def record(hidden: Tensor, call: Call) -> None:
            entry.append(hidden)
            calls.append(call)
            if len(calls) == len(self._stubs):
                raise _Recorded

        for stub in self._stubs:
            stub.record = record
        try:
            self._run(ids.to(self.device))
        except _Recorded:
            pass
        finally:
            for stub in self._stubs:
                stub.record = None
        return entry[0], calls

    def run_block(self, index: int, hidden: Tensor) -> Tensor:
        """Hidden states after block `index`, in their own precision, which must be the block's; their shape
        must have gone through `embed`."""
        call = self._calls[tuple(hidden.shape[:2])][index]
        if hidden.dtype != self.dtype:
            call = tree_map(lambda part: _cast(part, hidden.dtype), (call.args, call.kwargs))
            call = Call(*call)
        with torch.no_grad():
            out = self.blocks[index](hidden, *call.args, **call.kwargs)
        return out[0] if isinstance(out, tuple) else out

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[tokens, vocabulary]` of the last block's output `hidden [tokens, hidden]`.

        The model's own code runs what follows the blocks: norm, head, soft-capping, scaling.
        """
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=self.device)
        self._stubs[-1].replacement = hidden[None].to(self.device)
        try:
            return self._run(ids).logits[0]
        finally:
            self._stubs[-1].replacement = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter by its name in the model, those of the blocks included; values may be on meta."""
        for index, block in enumerate(self.blocks):
            names = self.block_names(index)
            yield from ((names[local], parameter) for local, parameter in block.named_parameters())
        yield from self.model.named_parameters()

    def holds(self, name: str) -> bool:
        """Whether the checkpoint has a tensor for the model's tensor `name`."""
        return name in self._stored

    def block_names(self, index: int) -> dict[str, str]:
        """Name inside block `index` -> name in the model."""
        return {name: f"{self.blocks_name}.{index}.{name}" for name in self.blocks[index].state_dict()}

    def fetch_block(
        self, index: int, checkpoint: Checkpoint | None = None, decoded: bool = False
    ) -> FetchedBlock:
        """Read block `index` into the host's memory; see `load_block`. May run beside the device's work."""
        checkpoint = checkpoint or self.checkpoint
        names = self.block_names(index)
        stored = {name: self._stored[names[name]] for name in names if names[name] in self._stored}
        packed = {n: key for n, key in stored.items() if checkpoint.is_quantized(key) and not decoded}
        tensors = {
            name: pinned(self.read(names[name], tensor, checkpoint), self.device)
            for name, tensor in self.blocks[index].state_dict().items()
            if name in stored and name not in packed
        }
        parts = {name: checkpoint.parts(key) for name, key in packed.items()}
        return FetchedBlock(tensors, parts, packed, checkpoint.layout)

    def load_block(
        self,
        index: int,
        checkpoint: Checkpoint | None = None,
        decoded: bool = False,
        fetched: FetchedBlock | None = None,
    ) -> nn.Module:
        """Load the weights of block `index`, from `checkpoint` instead of the skeleton's own if given, or as
        they were `fetched` before.

        Packed linears compute as `install` says; `decoded`: with the decoded weight alone, whatever the
        layout does to activations.
        """
        fetched = fetched or self.fetch_block(index, checkpoint, decoded)
        block = self.blocks[index]
        state = {name: tensor.to(self.device, non_blocking=True) for name, tensor in fetched.tensors.items()}
        block.load_state_dict(state, strict=False, assign=True)
        block.requires_grad_(False)
        for name, parts in fetched.parts.items():
            for part, tensor in parts.items():
                parts[part] = tensor.to(self.device)
            self.install(index, name.removesuffix(".weight"), fetched.layout, parts, fetched.stored[name])
        return block

    def install(
        self, index: int, local: str, layout: Layout, parts: dict[str, Tensor], stored: str
    ) -> Tensor:
        """Make linear `local` of a loaded block compute what a client computes with the packed `parts`,
        and return the decoded weight `[out, in]`.

        That is the decoded weight, or the layout's own module where activations are quantized, too.
        """
        block = self.blocks[index]
        linear = block.get_submodule(local)
        layout = layout.at(stored.removesuffix(".weight"))
        values = layout.values(parts).to(self.dtype)
        values = checked(values, linear.weight.shape, stored).to(self.device)
        module = layout.module(parts, linear.bias)
        if module is None:
            linear.weight = nn.Parameter(values, requires_grad=False)
        else:
            self._replaced[index, local] = linear
            block.set_submodule(local, module.to(self.device))
        return values

    def stored_dtype(self, index: int, name: str) -> torch.dtype:
        """The precision in which parameter `name` of a block is stored; if packed, the model's own."""
        stored = self._stored[self.block_names(index)[name]]
        if self.checkpoint.is_quantized(stored):
            declared = self.checkpoint.config.dtype
            return declared if isinstance(declared, torch.dtype) else self.dtype
        return TORCH_DTYPES.get(self.checkpoint.infos[stored].dtype, self.dtype)

    def as_stored(self, index: int, name: str) -> tuple[str, Tensor]:
        """Stored name of parameter `name` of a block, and its present values as they are stored."""
        model_name = self.block_names(index)[name]
        tensor = self.blocks[index].get_parameter(name).to(self.stored_dtype(index, name))
        return self._stored[model_name], tensor.t() if model_name in self._transposed else tensor

    def free_block(self, index: int) -> None:
        """Give the memory of block `index` back to the system; its parameters return to meta."""
        block = self.blocks[index]
        for key in [key for key in self._replaced if key[0] == index]:
            block.set_submodule(key[1], self._replaced.pop(key))
        state = {name: parameter.to("meta") for name, parameter in block.named_parameters()}
        block.load_state_dict(state, strict=False, assign=True)
        return_freed_pages()


def checked(tensor: Tensor, shape: Sequence[int], stored: str) -> Tensor:
    """The tensor itself. Raises QuantkitError unless it has this shape and is finite."""
    if tuple(tensor.shape) != tuple(shape):
        raise QuantkitError(
            f"{stored} is {list(tensor.shape)}, the configuration says {list(shape)}",
            hint="config.json and weights belong to different models",
        )
    if tensor.is_floating_point() and not is_finite(tensor):
        raise QuantkitError(
            f"{stored} holds NaN or infinite values in {str(tensor.dtype).removeprefix('torch.')}",
            hint="the checkpoint is damaged, or its weights overflow: try --dtype float32",
        )
    return tensor


def _cast(part, dtype: torch.dtype):
    return part.to(dtype) if isinstance(part, Tensor) and part.is_floating_point() else part


def _same(a, b) -> bool:
    """Whether two calls, or their arguments, hold equal tensors."""
    if isinstance(a, Call):
        return _same((*a.args, *a.kwargs.values()), (*b.args, *b.kwargs.values()))
    if isinstance(a, (tuple, list)):
        return all(_same(x, y) for x, y in zip(a, b, strict=True))
    return not isinstance(a, Tensor) or torch.equal(a, b)


class _Recorded(Exception):
    """Ends a forward pass once every block's arguments are known."""


class _Stub(nn.Module):
    """Stands in for a block: passes hidden states on, shows the block's attributes to the model."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.__dict__["block"] = block  # not a child: its weights are not the model's to move
        self.returns_tuple = False
        self.record = None
        self.replacement: Tensor | None = None

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)

    def forward(self, *args, **kwargs):
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        if self.record:
            self.record(hidden, Call(tuple(args[1:]), kwargs))
        if self.replacement is not None:
            hidden = self.replacement
        return (hidden,) if self.returns_tuple else hidden


def check_complete(skeleton: Skeleton) -> None:
    """Raise QuantkitError naming every parameter that the checkpoint lacks, or has in another shape."""
    missing = skeleton.missing()
    if missing:
        raise QuantkitError(
            f"the checkpoint lacks {count(len(missing), 'tensor')} of the model: {name_all(missing)}",
            hint="the download is incomplete, config.json belongs to another model, or the architecture "
            "fuses tensors while loading (mixtures of experts), which quantkit does not read yet",
        )
    misshapen = skeleton.misshapen()
    if misshapen:
        raise QuantkitError(
            "; ".join(misshapen[:8]) + (f"; and {len(misshapen) - 8} more" if misshapen[8:] else ""),
            hint="config.json and weights belong to different models",
        )
