"""Run a function again and again on tensors of the same shapes: on CUDA as one launch.

A column of error feedback takes a GPU less time than the launches of its kernels take the host. So the second
call with the same shapes is recorded as a CUDA graph, and later calls only replay the graph. A graph works on
fixed addresses: arguments are copied to them, and results are copied back. The operations are the same.
Other accelerators copy in the same way and run the function itself; a CPU does without this file.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.grids.grid import each_of
from quantkit.models.machine.device import graph_pool, record_graph

LARGEST = 1 << 23  # elements of the first tensor; above, kernels take longer than their launches
KEPT = 24  # size of the LRU cache of functions with their addresses and graphs


class Replays:
    """Calls functions, `function(*changed, *given, params)`, which change the tensors `changed` in place and
    return new parameters. They must not wait for the device or depend on values that `key` does not name."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Replay] = {}
        self._pool = None  # memory that graphs share: only one runs at a time

    def __call__(
        self,
        function: Callable[..., list],
        key: Hashable,
        changed: Sequence[Tensor],
        given: Sequence[Tensor],
        params: Sequence[Any] = (),
    ) -> list:
        """Return what `function` returns. key: identifies the function, without the shapes."""
        tensors = [*changed, *given]
        if tensors[0].numel() > LARGEST:
            return function(*tensors, params)
        key = (key, tensors[0].device, len(params), *(tensor.shape for tensor in tensors))
        self._pool = self._pool or graph_pool(tensors[0].device)
        replay = self._kept.pop(key, None) or _Replay(function, tensors, params)
        self._kept[key] = replay
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        new_params = replay(tensors, params, self._pool)
        for tensor, result in zip(changed, replay.tensors, strict=False):
            tensor.copy_(result)
        return new_params


class _Replay:
    """A function with arguments at fixed addresses."""

    def __init__(self, function: Callable[..., list], tensors: Sequence[Tensor], params: Sequence[Any]):
        self.function, self.calls = function, 0
        self.tensors = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in tensors]
        self.params = [each_of(torch.clone, each) for each in params]
        self.graph = None  # what `record_graph` returns

    def __call__(self, tensors: Sequence[Tensor], params: Sequence[Any], pool: Any) -> list:
        for buffer, tensor in zip(self.tensors, tensors, strict=True):
            buffer.copy_(tensor)
        for kept, given in zip(self.params, params, strict=True):
            each_of(Tensor.copy_, kept, given)
        self.calls += 1
        if self.calls == 2 and pool is not None:  # the first call loads kernels and fills caches of constants
            recorded = record_graph(lambda: self.function(*self.tensors, self.params), pool)
            self.result, self.graph = recorded or (None, None)
        if self.graph:
            self.graph.replay()
        else:
            self.result = self.function(*self.tensors, self.params)
        return [each_of(torch.clone, each) for each in self.result]
