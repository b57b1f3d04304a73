"""The original model on the same tokens as the one that is being quantized: what its linears would see.

Before a block is quantized, the original states run through it: what enters its sites is kept, and what its
writers (residual.py) add to the hidden states. Then, as the quantized model comes to a site batch by batch,
each meets its counterpart. Experts' own linears have none, for tokens are routed otherwise there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.models.machine import distributed
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate.capture import Meant
from quantkit.quantize.calibrate.residual import find_writers
from quantkit.quantize.calibrate.sites import PROBE_TOKENS, Site
from quantkit.quantize.calibrate.states import States

Batches = dict[int, Tensor]


class Original:
    """A block with its original weights, which `original` states run through at once, and later, while it is
    quantized, `states`: by `run`. leaving: what the original states become.

    Kept are, per token, the inputs of all sites and the outputs of all writers but the last, where the states
    are kept.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        index: int,
        sites: Iterable[Site],
        wanted: Iterable[Site],
        original: States,
        states: States,
    ):
        self._skeleton, self._index = skeleton, index
        self._original, self._states = original, states
        self._where = torch.device("cpu") if original.on_host or original.spilled else skeleton.device
        # each forward that is suspended has its own; probing ones have none
        self._batch: ContextVar[int | None] = ContextVar("batch", default=None)
        self._inputs: dict[Site, Batches] = {
            site: {} for site in wanted if site.linears and not site.pool and site.calls == 1
        }
        probe = distributed.broadcast(lambda: original[0][:1, :PROBE_TOKENS].clone())
        self._block = skeleton.blocks[index]
        self.writers = find_writers(self._block, list(sites), partial(skeleton.run_block, index), probe)
        self._theirs: dict[str, Batches] = {name: {} for name in self.writers[:-1]}
        self._ours: dict[str, Batches] = {name: {} for name in self.writers[:-1]}
        self._scales: dict[Site, Tensor] = {}
        self.leaving = self._observe()
        self._hooks = self._listen(self._ours, skeleton.device)

    def run(self, k: int, most: int | None = None) -> Tensor:
        """The block's output on batch k of the states, or `most` of its sequences, as it computes now."""
        return self._run(self._states, k, most)

    def _run(self, states: States, k: int, most: int | None = None) -> Tensor:
        token = self._batch.set(k)
        try:
            return self._skeleton.run_block(self._index, states[k][:most])
        finally:
            self._batch.reset(token)

    def meant(self, site: Site, k: int | None = None) -> Meant | None:
        """What batch k is in the original model where it has come to `site`; None where nothing is known.
        Without k, of the forward that asks. Asked once for each."""
        if site not in self._inputs:
            return None
        k = self._batch.get() if k is None else k
        inputs = self._inputs[site].pop(k).to(self._skeleton.device)
        if site in self._scales:
            inputs = inputs / self._scales[site]
        return Meant(inputs, self._missing(site.linears[0], k) if len(site.linears) == 1 else None)

    def divide(self, scales: Mapping[Site, Tensor]) -> None:
        """The block divides these sites' inputs by a scale, `[in]`, now: so is what was kept of them."""
        self._scales.update(scales)

    def _missing(self, name: str, k: int) -> Tensor | None:
        """What the hidden states lack that a writer adds to, `[batch, tokens, hidden]`."""
        if name not in self.writers:
            return None
        missing = self._original[k].float() - self._states[k]
        for before in self.writers[: self.writers.index(name)]:
            missing += self._theirs[before][k].to(missing.device)
            missing -= self._ours[before][k]
        return missing

    def close(self) -> None:
        """Listen no more, and let go of what was kept."""
        self._hooks.close()
        for kept in (*self._inputs.values(), *self._theirs.values(), *self._ours.values()):
            kept.clear()

    def _observe(self) -> list[Tensor]:
        """Let the original states through; returns what leaves the block."""
        with self._listen(self._theirs, self._where) as stack:
            for site, kept in self._inputs.items():
                hook = self._block.get_submodule(site.place).register_forward_pre_hook(
                    lambda module, args, kept=kept: self._keep(kept, args[0], self._where)
                )
                stack.callback(hook.remove)
            outputs = self._skeleton.in_step(
                self._index, partial(self._run, self._original), len(self._original)
            )
            return [output.to(self._where) for output in outputs]

    def _listen(self, kept: dict[str, Batches], where: torch.device) -> ExitStack:
        """Until it is closed, keep what writers say."""
        stack = ExitStack()
        for name, batches in kept.items():

            def keep(module: nn.Module, args: tuple, output: Tensor, batches: Batches = batches) -> None:
                self._keep(batches, output, where)

            stack.callback(self._block.get_submodule(name).register_forward_hook(keep).remove)
        return stack

    def _keep(self, kept: Batches, tensor: Tensor, where: torch.device) -> None:
        if (k := self._batch.get()) is not None:
            kept[k] = tensor.to(where, copy=True)
