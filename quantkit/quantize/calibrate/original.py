"""The original model's run on the same tokens as the model that is being quantized.

Before a block is quantized, the original model's hidden states run through it; the inputs of its sites and
the outputs of its writers (residual.py) are kept. Each of these batches of the quantized model at a site then
has a counterpart. Sites of single experts have none, because the original model routes tokens differently.

The original model runs on a sample of the batches (`original_every`), because the move of the weights
(`retarget` in statistics.py) needs fewer tokens than error feedback.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.models.machine.device import to_host
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate.capture import Counterpart
from quantkit.quantize.calibrate.residual import find_writers
from quantkit.quantize.calibrate.sites import Block, Site
from quantkit.quantize.calibrate.states import States

Batches = dict[int, Tensor]


class Original:
    """A block with its original weights, run on the `original` model's hidden states: one batch for each
    number in `sample`, this rank's numbers of batches. Later `run` runs the same block on `states`, while it
    is quantized. leaving: the outputs for the original states.

    The inputs of all sites and the outputs of all writers but the last are kept where the states are.
    """

    def __init__(
        self, skeleton: Skeleton, block: Block, original: States, states: States, sample: Sequence[int]
    ):
        self._skeleton, self._index, self._block = skeleton, block.index, block.module
        self._original, self._states = original, states
        self._at = {k: at for at, k in enumerate(sample)}
        self._home = original.home
        # each forward that is suspended has its own; probing ones have none
        self._batch: ContextVar[int | None] = ContextVar("batch", default=None)
        self._inputs: dict[Site, Batches] = {site: {} for site in block.around if site.calls == 1}
        run, inside = partial(skeleton.trace_block, block.index), block.index < skeleton.depth
        self.writers = find_writers(block.module, block.sites, run, block.probe) if inside else []
        self._original_outputs: dict[str, Batches] = {name: {} for name in self.writers[:-1]}
        self._outputs: dict[str, Batches] = {name: {} for name in self.writers[:-1]}
        self._scales: dict[Site, Tensor] = {}
        self.leaving = self._observe()
        self._hooks, self._hooked = ExitStack(), []

    def run(self, k: int, most: int | None = None) -> Tensor:
        """Return the block's output for batch k of the quantized model. most: its first sequences alone."""
        writers = [self._block.get_submodule(name) for name in self._outputs]
        if writers != self._hooked:  # the first time, or since a layout's own module replaced a linear
            self._hooks.close()
            self._hooks, self._hooked = self._listen(self._outputs, self._skeleton.device), writers
        return self._run(k if k in self._at else None, self._states[k][:most])

    def _run(self, k: int | None, hidden: Tensor) -> Tensor:
        token = self._batch.set(k)
        try:
            return self._skeleton.run_block(self._index, hidden)
        finally:
            self._batch.reset(token)

    def counterpart(self, site: Site, k: int | None = None) -> Counterpart | None:
        """Return batch k at `site` in the original model, and forget it; None if unknown. Without k, the
        batch is that of the forward pass that is running."""
        k = self._batch.get() if k is None else k
        if site not in self._inputs or k not in self._at:
            return None
        inputs = self._inputs[site].pop(k).to(self._skeleton.device, non_blocking=True)
        if site in self._scales:
            inputs = (inputs / self._scales[site]).to(inputs.dtype)
        if len(site.linears) > 1:
            return Counterpart(inputs)
        (name,) = site.linears
        weight = self._skeleton.part(self._index, name).weight
        if name in self.writers:
            return Counterpart(inputs, weight, *self._hidden(name, k))
        return Counterpart(inputs, weight if len(weight) <= site.in_features else None)

    def divide(self, scales: Mapping[Site, Tensor]) -> None:
        """Divide the kept inputs of these sites by a scale `[in]`, as the transformed block does."""
        self._scales.update(scales)

    def _hidden(self, name: str, k: int) -> tuple[Tensor, Tensor]:
        """Return the hidden states that a writer adds to, original minus quantized, and the RMS there."""
        hidden = self._original[self._at[k]].float()
        quantized = self._states[k].float()
        take = dict.pop if name == self.writers[-1] else dict.__getitem__  # the last to ask
        for before in self.writers[: self.writers.index(name)]:
            hidden = hidden + take(self._original_outputs[before], k).to(hidden.device, non_blocking=True)
            quantized = quantized + take(self._outputs[before], k)
        return hidden - quantized, hidden.square().mean(-1).sqrt_()

    def close(self) -> None:
        """Remove the hooks and free all kept tensors."""
        self._hooks.close()
        for kept in (*self._inputs.values(), *self._original_outputs.values(), *self._outputs.values()):
            kept.clear()

    def _observe(self) -> list[Tensor]:
        """Run the original states through the block and return its outputs."""
        inputs = {site.module: kept for site, kept in self._inputs.items()}
        with self._listen(self._original_outputs, self._home), self._listen(inputs, self._home, inputs=True):
            batches = list(self._at)
            run = lambda at: self._run(batches[at], self._original[at])  # noqa: E731
            outputs = self._skeleton.in_step(self._index, run, len(batches))
            return [to_host(output) if self._home.type == "cpu" else output for output in outputs]

    def _listen(self, kept: dict[str, Batches], where: torch.device, inputs: bool = False) -> ExitStack:
        """Keep the outputs of linears, or their inputs, until the returned stack is closed."""
        stack = ExitStack()
        for name, batches in kept.items():

            def keep(module: nn.Module, args: tuple, output: Tensor, batches: Batches = batches) -> None:
                tensor = args[0] if inputs else output
                if (k := self._batch.get()) is not None:
                    away = where.type == "cpu" and not tensor.is_cpu
                    batches[k] = to_host(tensor, wait=False) if away else tensor.to(where, copy=True)

            stack.enter_context(self._block.get_submodule(name).register_forward_hook(keep))
        return stack
