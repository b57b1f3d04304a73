"""Recording: what the model hands to each of its blocks, masks and rotary embeddings, whatever it is.

Stubs stand in for the blocks. They let hidden states pass and record the arguments they were called with, by
which a block is run by itself. What flows from one to the next may be more than hidden states: see `flow`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.models.skeleton.flow import IDS, Part, digits, ids_of

RETURNS = (None, (), (None,), (None, None))  # what blocks return: a tensor, or a tuple with this behind it
SHAPES = 8  # whose arguments are kept, the last used: a job has three, tasks one for every length of text


Call = tuple[tuple, dict]  # arguments of one block for hidden states of one shape, those left out
Record = Callable[[Tensor, Call], None]


@dataclass(frozen=True)
class Calls:
    """What every block is called with for ids of one shape, or for these `ids` where it depends on them.
    stores: mappings that blocks are given empty, into which some put what others find there."""

    calls: list[Call]
    stores: list[MutableMapping]
    ids: Tensor

    def serve(self, ids: Tensor | None) -> bool:
        """Whether they are those of `ids`; of any for None."""
        return ids is None or torch.equal(self.ids, ids)


class Recorder:
    """The model, which computes in `dtype`, with stubs in place of the blocks of `container`."""

    def __init__(
        self, model: nn.Module, container: nn.ModuleList, dtype: torch.dtype, device: torch.device
    ):
        self._model, self._kind = model, type(model).__name__
        self._dtype, self._device = dtype, device
        self._calls: dict[tuple[int, ...], Calls] = {}  # by [batch, tokens], the last used at the end
        self._hidden = Part(0, 1, ())
        self._by_ids = False
        self._left: dict[int, tuple[list[Part], TreeSpec]] = {}  # by earlier blocks, as it enters a block
        self._stubs = [_Stub(block) for block in container]
        for index, stub in enumerate(self._stubs):
            container[index] = stub

    def learn(self) -> None:
        """How hidden states pass, and whether arguments depend on the ids or serve all of their shape.

        Raises QuantkitError for a model whose blocks cannot be run by themselves.
        """
        self._learn_return_type()
        (hidden, calls), (_, others) = (self._record(row) for row in torch.arange(8).view(2, 1, 4))
        self._by_ids = not _same(calls.calls, others.calls)
        (rows, _), (tokens, _) = (self._record(torch.zeros(shape).long()) for shape in ((2, 4), (1, 5)))
        part = Part.between(hidden.shape, rows.shape, tokens.shape)
        if part is None:
            raise _unsupported(f"the hidden states of {self._kind} are {list(hidden.shape)} for 4 tokens")
        self._hidden = part

    def embed(self, ids: Tensor) -> Tensor:
        """The flow that enters the first block; the arguments of all are recorded for this shape."""
        hidden, calls = self._record(ids)
        self._keep(tuple(ids.shape), calls)
        return self._pack(hidden, ids, [])

    def run(self, index: int, block: nn.Module, flow: Tensor) -> Tensor:
        """The flow behind block `index`."""
        hidden, ids, left = self._unpack(index, flow)
        calls = self._recorded(flow.shape[:2], ids)
        stores = {id(store): copy(store) for store in calls.stores}  # other batches may be on their way, too
        for store, found in zip(stores.values(), left or [{}] * len(stores), strict=True):
            store.clear()
            store.update(found)

        def given(part: object) -> object:
            other = hidden.dtype != self._dtype and _is_float(part)
            return part.to(hidden.dtype) if other else stores.get(id(part), part)

        call = tree_map(given, calls.calls[index], is_leaf=lambda part: id(part) in stores)
        args, kwargs = call
        out = block(hidden, *args, **kwargs)
        hidden = out[0] if isinstance(out, (tuple, list)) else out
        return self._pack(hidden, ids, self._leave(index + 1, list(stores.values()), flow))

    def logits(self, flow: Tensor) -> Tensor:
        """Logits `[tokens, vocabulary]` of the last block's output `flow [tokens, width]`."""
        hidden, ids, _ = self._unpack(len(self._stubs), flow[None].to(self._device))
        ids = torch.zeros(1, len(flow), dtype=torch.long) if ids is None else ids
        self._stubs[-1].replacement = hidden
        try:
            return self._run(ids).logits[0]
        finally:
            self._stubs[-1].replacement = None

    def _pack(self, hidden: Tensor, ids: Tensor | None, left: list[Tensor]) -> Tensor:
        """The flow of hidden states, the ids they come from where blocks need them, and what blocks left."""
        columns = [self._hidden.pack(hidden), *left]
        if self._by_ids:
            columns.insert(1, IDS.pack(digits(ids.to(hidden.device)).to(hidden.dtype)))
        return torch.cat(columns, -1) if columns[1:] else columns[0]

    def _unpack(self, index: int, flow: Tensor) -> tuple[Tensor, Tensor | None, list[dict]]:
        """Inverse of `_pack`, for the flow that enters block `index`."""
        left, spec = self._left.get(index, ([], None))
        parts = [self._hidden, *[IDS] * self._by_ids, *left]
        columns = flow.split([part.width for part in parts], -1)
        hidden, *others = (part.unpack(found) for part, found in zip(parts, columns, strict=True))
        ids = ids_of(others.pop(0)) if self._by_ids else None
        return hidden, ids, tree_unflatten(others, spec) if spec else []

    def _leave(self, index: int, stores: list[MutableMapping], flow: Tensor) -> list[Tensor]:
        """Columns of what earlier blocks leave for block `index` and those behind it, beside the hidden
        states `flow`."""
        leaves, spec = tree_flatten([dict(store) for store in stores])
        if not leaves:
            return []
        if index not in self._left:
            parts = [Part.of_keys(leaf.shape, *flow.shape[:2]) for leaf in leaves]
            if None in parts:
                raise _unsupported(f"blocks of {self._kind} leave others what is not known by token")
            self._left[index] = parts, spec
        return [part.pack(leaf) for part, leaf in zip(self._left[index][0], leaves, strict=True)]

    def _recorded(self, shape: tuple[int, ...], ids: Tensor | None) -> Calls:
        """What blocks are given beside hidden states of `shape` `[batch, tokens]`."""
        calls = self._calls.get(shape)
        if calls is None or not calls.serve(ids):
            _, calls = self._record(torch.zeros(shape, dtype=torch.long) if ids is None else ids)
        self._keep(shape, calls)
        return calls

    def _keep(self, shape: tuple[int, ...], calls: Calls) -> None:
        self._calls.pop(shape, None)
        self._calls[shape] = calls
        if len(self._calls) > (1 if self._by_ids else SHAPES):
            del self._calls[next(iter(self._calls))]

    def _run(self, ids: Tensor):
        with torch.no_grad():
            return self._model(ids.to(self._device), use_cache=False)

    @contextmanager
    def _listening(self, record: Record | None) -> Iterator[None]:
        for stub in self._stubs:
            stub.record = record
        try:
            yield
        finally:
            for stub in self._stubs:
                stub.record = None

    def _record(self, ids: Tensor) -> tuple[Tensor, Calls]:
        """Hidden states that enter block 0, and the arguments of every block."""
        ids = ids.to(self._device)
        calls: list[Call] = []
        entry: list[Tensor] = []

        def record(hidden: Tensor, call: Call) -> None:
            entry.append(hidden)
            calls.append(call)
            if len(calls) == len(self._stubs):
                raise _Recorded

        with self._listening(record):
            try:
                self._run(ids)
            except _Recorded:
                pass
        return entry[0], Calls(calls, _stores(calls), ids)

    def _learn_return_type(self) -> None:
        """Whether blocks return a tensor or a tuple: whichever lets the hidden states pass unchanged."""
        wrong = None
        for returns in RETURNS:
            for stub in self._stubs:
                stub.returns = returns
            try:
                if self._passes_unchanged():
                    return
            except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
                wrong = error if returns in RETURNS[:2] else wrong
        if wrong:  # no way works: the model's own error says most
            raise wrong
        raise _unsupported(f"{self._kind} passes its hidden states from block to block in an unknown way")

    def _passes_unchanged(self) -> bool:
        shapes = []
        with self._listening(lambda hidden, call: shapes.append(hidden.shape)):
            logits = self._run(torch.zeros(1, 4, dtype=torch.long)).logits
        if len(shapes) != len(self._stubs):
            raise _unsupported(f"{self._kind} calls its {len(self._stubs)} blocks {len(shapes)} times")
        return len(set(shapes)) == 1 and logits.shape[:2] == (1, 4)


class _Recorded(Exception):
    """Ends a forward pass once every block's arguments are known."""


class _Stub(nn.Module):
    """Stands in for a block: passes hidden states on, shows the block's attributes to the model."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.__dict__["block"] = block  # not a child: its weights are not the model's to move
        self.returns = RETURNS[0]
        self.record: Record | None = None
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
            self.record(hidden, (tuple(args[1:]), kwargs))
        if self.replacement is not None:
            hidden = self.replacement
        return hidden if self.returns is None else (hidden, *self.returns)


def _unsupported(message: str) -> QuantkitError:
    return QuantkitError(message, "quantkit does not compress this architecture yet", UNSUPPORTED)


def _stores(calls: list[Call]) -> list[MutableMapping]:
    """Mappings that blocks are given empty."""
    leaves = tree_leaves(calls, is_leaf=_is_empty)
    return list({id(leaf): leaf for leaf in leaves if _is_empty(leaf)}.values())


def _is_empty(part: object) -> bool:
    return isinstance(part, MutableMapping) and not part


def _is_float(part: object) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point()


def _same(calls: list[Call], others: list[Call]) -> bool:
    """Whether they hold equal tensors."""
    pairs = zip(tree_leaves(calls), tree_leaves(others), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
