"""The model without its blocks' weights: embeddings, final norm and head are real, blocks come and go.

transformers builds the model on the meta device. The decoder blocks are then replaced by stubs that record
the arguments they are called with (`recording`); a block is later run by itself with what its stub recorded,
so masks and rotary embeddings are the model's own, whatever the architecture. There is no table of
architectures: the blocks are the ModuleList as long as the configuration says the model is deep. Experts that
transformers fuses are linears again (`experts`). Text does not enter the towers of other modalities: they
stay on the meta device (`names`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quantkit.layouts import Layout
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton import experts, meta_model, streaming
from quantkit.models.skeleton.loading import FetchedBlock, Installer, Reader
from quantkit.models.skeleton.names import Names, set_aside
from quantkit.models.skeleton.recording import Recorder
from quantkit.models.skeleton.streaming import Keeper

T = TypeVar("T")


class Skeleton:
    """A checkpoint as a model whose decoder blocks are loaded one at a time.

    `blocks[i]` is the real block, on the meta device until `load_block(i)`. All tensors are in `dtype` on
    `device`, except buffers, which keep the precision the architecture gives them. `parameters` counts
    those of the whole model. towers: of other modalities, by name, on the meta device for good. `checkpoint`
    has a tensor for each expert, also where one is stored for all. streams: a loaded block reads its experts
    when they are called (`streaming`), with the same results; set it before blocks are loaded.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.device = device
        self.model = meta_model.build(checkpoint, dtype, device)
        self.checkpoint = experts.of_checkpoint(self.model, checkpoint)
        name, container = meta_model.find_blocks(self.model, checkpoint)
        transposed = meta_model.replace_conv1d(self.model)
        self.names = Names(self.model, name, transposed, self.checkpoint)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.towers = set_aside(self.model, self.names.towers)
        self.blocks = list(container)
        self._recorder = Recorder(self.model, container, dtype, device)
        self._reader = Reader(self.names, self.checkpoint, dtype, device)
        self._installer = Installer(dtype, device)
        self._keepers: dict[int, Keeper] = {}  # of loaded blocks whose experts are streamed
        self.streams = streaming.pays(self.blocks, dtype.itemsize, device)

    @property
    def is_mixture(self) -> bool:
        """Return whether some blocks have experts."""
        return any(isinstance(part, experts.Experts) for block in self.blocks for part in block.modules())

    def stored_parameters(self) -> dict[str, nn.Parameter]:
        """Return every parameter that the checkpoint holds, by its name in the model; values may be on
        meta."""
        inside = {
            self.names.of_block(index, local): parameter
            for index, block in enumerate(self.blocks)
            for local, parameter in block.named_parameters()
        }
        outside = {
            f"{name}.{local}": parameter
            for name, tower in self.towers.items()
            for local, parameter in tower.named_parameters()
        }
        everything = inside | dict(self.model.named_parameters()) | outside
        return {name: everything[name] for name in everything if name in self.names.stored}

    def read(self, name: str, expected: Tensor) -> Tensor:
        """Return the values of the model's tensor `name` on the host, in the type it computes with; see
        `Reader.read`."""
        return self._reader.read(name, expected)

    def load_rest(self) -> None:
        """Load everything outside the blocks, but for towers of other modalities; tied tensors stay one
        tensor, unless they are stored unlike.

        Raises QuantkitError for an architecture whose blocks cannot be run by themselves.
        """
        tensors, stored = self.model.state_dict(), self.names.stored.keys() | self.names.joined.keys()
        state = {
            name: self.read(name, tensor).to(self.device)
            for name, tensor in sorted(tensors.items(), key=lambda item: self._reader.place(item[0]))
            if name in stored and not name.startswith(self.names.blocks + ".")
        }
        self.model.load_state_dict(state, strict=False, assign=True)
        self.model.tie_weights(missing_keys=tensors.keys() - stored, recompute_mapping=False)
        self.model.requires_grad_(False)
        self._recorder.learn()

    def embed(self, ids: Tensor) -> Tensor:
        """Return the hidden states `[batch, tokens, hidden]` that enter block 0, for `ids [batch, tokens]`;
        see `flow` for models that pass more than that from block to block."""
        return self._recorder.embed(ids)

    def run_block(self, index: int, hidden: Tensor) -> Tensor:
        """Return the hidden states after block `index`, in their own precision, which must be the block's."""
        with torch.no_grad():
            return self._recorder.run(index, self.blocks[index], hidden)

    def trace_block(self, index: int, hidden: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Return `run_block` with these values in place of the block's parameters, by their names in it;
        autograd follows into both."""

        def block(*args, **kwargs):
            return functional_call(self.blocks[index], dict(values), args, kwargs)

        return self._recorder.run(index, block, hidden)

    def in_step(self, index: int, run: Callable[[int], T], count: int) -> Iterator[T]:
        """Yield `run(0)`, `run(1)` … up to `count`, each of which runs block `index`: one after another, or
        some at a time if the block's experts are streamed, so that these are read once for all of them."""
        keeper = self._keepers.get(index)
        return keeper.in_step(run, count) if keeper else map(run, range(count))

    def outputs(self, index: int, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield `run_block` of every batch of hidden states."""
        return self.in_step(index, lambda k: self.run_block(index, batches[k]), len(batches))

    def logits(self, hidden: Tensor, values: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the logits `[tokens, vocabulary]` of the last block's output `hidden [tokens, hidden]`.

        The model's own code runs what follows the blocks: norm, head, soft-capping, scaling. values: in place
        of parameters outside the blocks, by their names in the model; autograd follows into both.
        """
        return self._recorder.logits(hidden, values)

    def fetch_block(
        self, index: int, checkpoint: Checkpoint | None = None, decoded: bool = False
    ) -> FetchedBlock:
        """Read block `index` into the host's memory; see `load_block`. The device may work meanwhile."""
        block, names = self.blocks[index], None
        if self.streams:
            experts = streaming.streamed(block)
            names = [name for name in block.state_dict() if name.rpartition(".")[0] not in experts]
        return self._reader_of(checkpoint).block(index, block, decoded, names)

    def _reader_of(self, checkpoint: Checkpoint | None) -> Reader:
        return replace(self._reader, checkpoint=checkpoint or self.checkpoint)

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
        block = self.blocks[index]
        self._installer.load(block, fetched or self.fetch_block(index, checkpoint, decoded))
        if self.streams and streaming.streamed(block):
            reader = self._reader_of(checkpoint)
            self._keepers[index] = Keeper(index, block, reader, self._installer, decoded)
        return block

    def away(self, index: int) -> frozenset[str]:
        """Return the linears of a loaded block that are read when they are called."""
        return frozenset(streaming.streamed(self.blocks[index]) if index in self._keepers else ())

    def lend(self, index: int, linears: Sequence[str]) -> None:
        """Keep these of the linears that are `away` in memory, and no others, until others are lent."""
        self._keepers[index].lend(linears)

    def keep_changed(self, index: int, name: str, again: Callable[[], Tensor]) -> None:
        """Replace a parameter of a linear that is `away` by the values that `again` returns."""
        self._keepers[index].keep_changed(name, again)

    def part(self, index: int, local: str) -> nn.Module:
        """Return module `local` of a loaded block, with its weights in memory."""
        module = self.blocks[index].get_submodule(local)
        if isinstance(module, streaming.ExpertLinear) and module.keeper:
            return module.keeper.provide(module)
        return module

    def install(
        self,
        index: int,
        local: str,
        layout: Layout,
        parts: dict[str, Tensor],
        stored: str,
        again: Callable[[], dict[str, Tensor]],
    ) -> Tensor:
        """Make linear `local` of a loaded block compute what a client computes with the packed `parts`,
        and return the decoded weight `[out, in]`.

        That is the decoded weight, or the layout's own module where activations are quantized, too. A
        streamed expert asks for its parts `again` when it comes back into memory.
        """
        self.part(index, local)
        if keeper := self._keepers.get(index):
            keeper.keep(local, layout, stored, again)
        return self._installer.install(self.blocks[index], local, layout, parts, stored)

    def free_block(self, index: int) -> None:
        """Give the memory of block `index` back to the system; its parameters return to meta."""
        if keeper := self._keepers.pop(index, None):
            keeper.close()
        self._installer.free(self.blocks[index])

    def stored_dtype(self, index: int, local: str) -> torch.dtype:
        """Return precision in which a parameter of block `index` is stored; if packed, the model's own."""
        return self._reader.stored_dtype(self.names.stored_of(index, local))

    def as_stored(self, index: int, local: str) -> tuple[str, Tensor]:
        """Return stored name of a parameter of block `index`, and its present values as they are stored."""
        owner, _, leaf = local.rpartition(".")
        tensor = getattr(self.part(index, owner), leaf).to(self.stored_dtype(index, local))
        transposed = self.names.of_block(index, local) in self.names.transposed
        return self.names.stored_of(index, local), tensor.t() if transposed else tensor
