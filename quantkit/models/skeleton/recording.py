"""Recording: the arguments that a model passes to its blocks, such as masks and rotary embeddings.

Stubs replace the blocks, pass hidden states on and record the arguments of their calls. A block can then run
alone with these arguments. Blocks may pass more than hidden states to each other: see `flow`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from quantkit.errors import UNSUPPORTED, QuantkitError, first_line
from quantkit.models.skeleton.flow import Flow, Part
from quantkit.models.skeleton.names import StandIn

RETURNS = (None, (), (None,), (None, None))  # a block returns a tensor, or a tuple that ends with these
UNFIT = (TypeError, ValueError, AttributeError, RuntimeError, IndexError)  # errors of a wrong return type
MIXED = re.compile("same dtype|expected scalar type")  # torch's errors for a product of two precisions
SHAPES = 8  # size of the LRU cache of arguments: a job has three shapes, tasks one per length of text
Call = tuple[tuple, dict]  # args and kwargs of a block, without the hidden states
Record = Callable[[Tensor, Call], None]


@dataclass(frozen=True)
class Calls:
    """The arguments of every block, for all ids of one shape, or only for `ids` if arguments depend on ids.
    stores: mappings that are empty before the first block and that blocks fill for later blocks."""

    calls: list[Call]
    stores: list[MutableMapping]
    ids: Tensor


class Recorder:
    """A model in `dtype` whose blocks (`container`) are replaced by stubs."""

    def __init__(self, model: nn.Module, container: nn.ModuleList, dtype: torch.dtype, device: torch.device):
        self._model, self._kind = model, type(model).__name__
        self._dtype, self._device = dtype, device
        self._calls: dict[tuple[int, ...], Calls] = {}  # by [batch, tokens], in order of last use
        self._flow = Flow()
        self._passed: list[int] = []  # indices of extra outputs that the next block reads
        self._stubs = [_Stub(block) for block in container]
        for index, stub in enumerate(self._stubs):
            container[index] = stub

    def learn(self) -> None:
        """Learn how blocks pass hidden states, and whether their arguments depend on the ids or only on their
        shape.

        Raises QuantkitError if the model's blocks cannot run alone.
        """
        self._learn_return_type()
        (hidden, calls), (_, others) = (self._record(ids) for ids in torch.arange(8).view(2, 1, 4))
        (rows, _), (tokens, _) = (self._record(torch.zeros(shape).long()) for shape in ((2, 4), (1, 5)))
        part = Part.between(hidden.shape, rows.shape, tokens.shape)
        if part is None or hidden.shape[part.tokens] != 4:
            raise _unsupported(f"the hidden states of {self._kind} are {list(hidden.shape)} for 4 tokens")
        pairs = zip(tree_leaves(calls.calls), tree_leaves(others.calls), strict=True)
        same = all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
        self._flow = Flow(part, by_ids=not same)

    def embed(self, ids: Tensor, values: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the flow into block 0, usually hidden states `[batch, tokens, hidden]`, for `ids [batch,
        tokens]`; record all arguments for this shape. values: see `logits`."""
        hidden, calls = self._record(ids, values)
        self._keep(tuple(ids.shape), calls)
        return self._flow.pack(0, hidden, ids, ())

    def run(self, index: int, block: Callable[..., object], flow: Tensor) -> Tensor:
        """Return the flow after block `index`. Raises QuantkitError if the block leaves unsupported data."""
        hidden, ids, left = self._flow.unpack(index, flow)
        calls = self._calls.get(flow.shape[:2])
        if calls is None or not (ids is None or torch.equal(calls.ids, ids)):
            _, calls = self._record(torch.zeros(flow.shape[:2], dtype=torch.long) if ids is None else ids)
        self._keep(flow.shape[:2], calls)
        filled, passed = left or ([{}] * len(calls.stores), {})
        stores = {id(store): copy(store) for store in calls.stores}  # other batches may be suspended
        for store, values in zip(stores.values(), filled, strict=True):
            store.clear()
            store.update(values)

        def current(leaf: object) -> object:
            if isinstance(leaf, _Passed):
                return passed.get(leaf.index)
            other = hidden.dtype != self._dtype and isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.to(hidden.dtype) if other else stores.get(id(leaf), leaf)

        args, kwargs = tree_map(current, calls.calls[index], is_leaf=lambda leaf: id(leaf) in stores)
        try:
            out = block(hidden, *args, **kwargs)
        except RuntimeError as error:
            if not MIXED.search(str(error)):
                raise
            what = f"blocks of {self._kind} multiply {str(self._dtype)[6:]} with another precision"
            raise QuantkitError(what, "compute in --dtype float32", UNSUPPORTED) from error
        hidden, *extra = out if isinstance(out, (tuple, list)) else (out,)
        passed = {index: extra[index] for index in self._passed if isinstance(extra[index], Tensor)}
        filled = [dict(store) for store in stores.values()]
        left = (filled, passed) if any(filled) or passed else ()
        try:
            return self._flow.pack(index + 1, hidden, ids, left)
        except ValueError as error:
            raise _unsupported(f"blocks of {self._kind} pass on a tensor of shape {error}") from error

    def logits(self, flow: Tensor, values: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the logits `[tokens, vocabulary]` of the last block's output `flow [tokens, width]`.

        The model's own code runs norm, head, soft-capping and scaling. values: replace parameters outside the
        blocks, by their names in the model; autograd tracks `flow` and `values`.
        """
        with self._after_blocks(flow[None].to(self._device)) as ids:
            return self._run(ids, values).logits[0]

    def head_inputs(self, flow: Tensor) -> Tensor:
        """Return the inputs of the model's head for the last block's output `flow [batch, tokens, width]`."""
        inputs: list[Tensor] = []

        def stop(module: nn.Module, args: tuple) -> None:
            inputs.append(args[0])
            raise _Recorded

        with self._after_blocks(flow) as ids, suppress(_Recorded), ExitStack() as stack:
            stack.callback(self._model.get_output_embeddings().register_forward_pre_hook(stop).remove)
            self._run(ids)
        return inputs[0]

    @contextmanager
    def _after_blocks(self, flow: Tensor) -> Iterator[Tensor]:
        """Let the model continue from the last block's output `flow [batch, tokens, width]`; yields ids."""
        hidden, ids, _ = self._flow.unpack(len(self._stubs), flow)
        self._stubs[-1].replacement = hidden
        try:
            yield torch.zeros(flow.shape[:2], dtype=torch.long) if ids is None else ids
        finally:
            self._stubs[-1].replacement = None

    def _keep(self, shape: tuple[int, ...], calls: Calls) -> None:
        self._calls.pop(shape, None)
        self._calls[shape] = calls
        if len(self._calls) > (1 if self._flow.by_ids else SHAPES):
            del self._calls[next(iter(self._calls))]

    def _run(self, ids: Tensor, values: Mapping[str, Tensor] | None = None):
        arguments = {"input_ids": ids.to(self._device), "use_cache": False}
        if values is not None:
            return functional_call(self._model, dict(values), (), arguments)
        with torch.no_grad():
            return self._model(**arguments)

    @contextmanager
    def _listening(self, record: Record | None) -> Iterator[None]:
        for stub in self._stubs:
            stub.record = record
        try:
            yield
        finally:
            for stub in self._stubs:
                stub.record = None

    def _record(self, ids: Tensor, values: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Calls]:
        """Return the hidden states that enter block 0, and the arguments of every block."""
        ids = ids.to(self._device)
        calls: list[Call] = []
        entry: list[Tensor] = []

        def record(hidden: Tensor, call: Call) -> None:
            entry.append(hidden)
            calls.append(call)
            if len(calls) == len(self._stubs):
                raise _Recorded

        with self._listening(record), suppress(_Recorded):
            self._run(ids, values)
        leaves = filter(_is_empty, tree_leaves(calls, is_leaf=_is_empty))
        return entry[0], Calls(calls, list({id(leaf): leaf for leaf in leaves}.values()), ids)

    def _learn_return_type(self) -> None:
        """Learn whether blocks return a tensor or a tuple: try each until hidden states pass unchanged."""
        wrong = None
        for returns in RETURNS:
            try:
                if self._passes_unchanged(returns):
                    return self._learn_passed(returns)
            except torch.OutOfMemoryError:
                raise
            except UNFIT as error:
                wrong = error if returns in RETURNS[:2] else wrong
        if wrong:  # the model's own error explains best why nothing works
            raise _unsupported(f"{self._kind} does not run on text alone: {first_line(wrong)}") from wrong
        raise _unsupported(f"{self._kind} passes its hidden states from block to block in an unknown way")

    def _learn_passed(self, returns: tuple | None) -> None:
        """Learn which extra outputs of a block the next block gets, by marks that stubs return."""
        self._passed = []
        marks = tuple(_Passed(index) for index in range(len(returns or ())))
        with suppress(*UNFIT):  # an error: the model inspects this output, so it is not merely forwarded
            if marks and self._passes_unchanged(marks):
                _, calls = self._record(torch.zeros(1, 4, dtype=torch.long))
                leaves = tree_leaves(calls.calls)
                self._passed = sorted({leaf.index for leaf in leaves if isinstance(leaf, _Passed)})
        for stub in self._stubs:
            stub.returns = marks if self._passed else returns

    def _passes_unchanged(self, returns: tuple | None) -> bool:
        shapes = []
        for stub in self._stubs:
            stub.returns = returns
        with self._listening(lambda hidden, call: shapes.append(hidden.shape)):
            logits = self._run(torch.zeros(1, 4, dtype=torch.long)).logits
        if len(shapes) != len(self._stubs):
            raise _unsupported(f"{self._kind} calls its {len(self._stubs)} blocks {len(shapes)} times")
        return len(set(shapes)) == 1 and logits.shape[:2] == (1, 4)


@dataclass(frozen=True)
class _Passed:
    """Placeholder for an extra output of the previous block. index: its position after the hidden states."""

    index: int


class _Recorded(Exception):
    """Raised to end a forward pass once all requested values are recorded."""


class _Stub(StandIn):
    """A stand-in for a block that passes hidden states on and records its arguments."""

    returns = RETURNS[0]
    record: Record | None = None
    replacement: Tensor | None = None

    def forward(self, *args, **kwargs):
        hidden = args[0] if args else kwargs.pop("hidden_states")
        if self.record:
            self.record(hidden, (tuple(args[1:]), kwargs))
        if self.replacement is not None:
            hidden = self.replacement
        return hidden if self.returns is None else (hidden, *self.returns)


def _unsupported(message: str) -> QuantkitError:
    return QuantkitError(message, "quantkit does not compress this architecture yet", UNSUPPORTED)


def _is_empty(argument: object) -> bool:
    """Return whether an argument is an empty mapping, which blocks may fill for later blocks."""
    return isinstance(argument, MutableMapping) and not argument
