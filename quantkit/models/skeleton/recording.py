"""Recording: what the model hands to each of its blocks, masks and rotary embeddings, whatever it is.

Stubs stand in for the blocks. They let hidden states pass and record the arguments they were called with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from quantkit.errors import UNSUPPORTED, QuantkitError

RETURNS = (None, (), (None,), (None, None))  # what blocks return: a tensor, or a tuple with this behind it
SHAPES = 8  # whose arguments are kept, the last used: a job has three, tasks one for every length of text


Call = tuple[tuple, dict]  # arguments of one block for hidden states of one shape, those left out
Record = Callable[[Tensor, Call], None]


class Recorder:
    """The model with stubs in place of the blocks of `container`."""

    def __init__(self, model: nn.Module, container: nn.ModuleList, device: torch.device):
        self._model, self._kind = model, type(model).__name__
        self._device = device
        self._calls: dict[tuple[int, ...], list[Call]] = {}  # by [batch, tokens], the last used at the end
        self._stubs = [_Stub(block) for block in container]
        for index, stub in enumerate(self._stubs):
            container[index] = stub

    def learn(self) -> None:
        """How hidden states pass. Raises QuantkitError for a model whose blocks read more than that: recorded
        arguments serve all tokens of their shape."""
        self._learn_return_type()
        (hidden, calls), (_, others) = (self._record(row) for row in torch.arange(8).view(2, 1, 4))
        if hidden.ndim != 3 or not _same(calls, others):
            raise _unsupported(f"the blocks of {self._kind} read more than one stream of hidden states")

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states that enter the first block; the arguments of all are recorded for this shape."""
        hidden, calls = self._record(ids)
        self._keep(tuple(ids.shape), calls)
        return hidden

    def call(self, index: int, shape: tuple[int, ...]) -> Call:
        """What block `index` is given beside hidden states of `shape` `[batch, tokens]`."""
        calls = self._calls.get(shape)
        if calls is None:
            _, calls = self._record(torch.zeros(shape, dtype=torch.long))
        self._keep(shape, calls)
        return calls[index]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[tokens, vocabulary]` of the last block's output `hidden [tokens, hidden]`."""
        self._stubs[-1].replacement = hidden[None].to(self._device)
        try:
            return self._run(torch.zeros(1, len(hidden), dtype=torch.long)).logits[0]
        finally:
            self._stubs[-1].replacement = None

    def _keep(self, shape: tuple[int, ...], calls: list[Call]) -> None:
        self._calls.pop(shape, None)
        self._calls[shape] = calls
        if len(self._calls) > SHAPES:
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

    def _record(self, ids: Tensor) -> tuple[Tensor, list[Call]]:
        """Hidden states that enter block 0, and the arguments of every block."""
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
        return entry[0], calls

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


def _same(calls: list[Call], others: list[Call]) -> bool:
    """Whether they hold equal tensors."""
    pairs = zip(tree_leaves(calls), tree_leaves(others), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
