"""The model without its blocks' weights. Blocks are loaded one at a time. The final norm stays loaded;
embedding and head stay loaded or on disk (`rows.py`).

transformers builds the model on the meta device. Stubs then replace the decoder blocks and record the
arguments they are called with (`recording`). Later a block runs alone with these arguments, so masks and
rotary embeddings are the model's own for every architecture. No table of architectures is needed: the blocks
are the ModuleList whose length is the configured number of layers. Experts that transformers fuses become
linears again (`experts`). Towers of other modalities, which text does not enter, stay on meta (`names`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quantkit.errors import UNSUPPORTED, require
from quantkit.layouts import Layout, LinearSpec
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.reading import DTYPES
from quantkit.models.machine.device import is_accelerator
from quantkit.models.skeleton import experts, fused, loading, meta_model, rows, streaming
from quantkit.models.skeleton.loading import FetchedBlock, Loader
from quantkit.models.skeleton.names import Names, set_aside
from quantkit.models.skeleton.recording import Recorder
from quantkit.models.skeleton.streaming import Keeper

T = TypeVar("T")


class Head(nn.Linear):
    """A model's head as a last block. Only its inputs are measured, so it computes no logits."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return no logits `[..., 0]`."""
        return hidden[..., :0]


class Skeleton:
    """A checkpoint as a model whose decoder blocks are loaded one at a time.

    blocks: the `depth` decoder blocks, and after `add_head` the head; block i is on the meta device until
    `load_block(i)`. All tensors are in `dtype` on `device`; only buffers keep the architecture's precision.
    parameters: number of weights of the whole model. towers: models of other modalities, by name, always on
    the meta device. checkpoint: has one tensor per expert, even if the file stacks them. streams: a loaded
    block reads its experts when they are called (`streaming`), with the same results; set it before blocks
    are loaded. keepers: those of the loaded blocks with streamed experts, by index. embed, logits, read:
    methods of `Recorder` and `Loader`.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.device = device
        self.model = meta_model.build(checkpoint, dtype, device)
        self.checkpoint = fused.one_by_one(self.model, checkpoint)
        experts.take_apart(self.model)
        name, container = meta_model.find_blocks(self.model, checkpoint)
        transposed = meta_model.replace_conv1d(self.model)
        self.names = Names(self.model, name, transposed, self.checkpoint)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.towers = set_aside(self.model, self.names.towers)
        self.blocks = list(container)
        self.depth = len(self.blocks)
        self._recorder = Recorder(self.model, container, dtype, device)
        self._loader = Loader(self.names, self.checkpoint, dtype, device)
        self.embed, self.logits, self.read = self._recorder.embed, self._recorder.logits, self._loader.read
        self.keepers: dict[int, Keeper] = {}
        self.streams = streaming.pays(self.blocks, dtype.itemsize, device)

    def add_head(self) -> str:
        """Make the model's head a last block, so that it can be quantized, and return its stored name.

        Raises QuantkitError if head and embedding are one tensor, or if the model has no head.
        """
        head = self.model.get_output_embeddings()
        name = next((name for name, module in self.model.named_modules() if module is head), "")
        tied = any(f"{name}.weight" in pair for pair in self.model.all_tied_weights_keys.items())
        separate = isinstance(head, nn.Linear) and f"{name}.weight" in self.names.stored and not tied
        what = f"{self.checkpoint.source} has no head of its own: it multiplies by the embedding"
        hint = "leave out --head: the embedding would stay in 16 bit as well; for mlx-lm use --embedding"
        require(separate, what, hint, UNSUPPORTED)
        above, dot, leaf = name.rpartition(".")
        self.names.above_head = above + dot
        copy = Head(head.in_features, head.out_features, False, device="meta", dtype=self.dtype)
        self.blocks.append(nn.ModuleDict({leaf: copy}))
        return self.names.stored[f"{name}.weight"].removesuffix(".weight")

    @property
    def is_mixture(self) -> bool:
        """Return whether some blocks have experts."""
        return any(isinstance(module, experts.Experts) for block in self.blocks for module in block.modules())

    def stored_parameters(self) -> dict[str, nn.Parameter]:
        """Return every stored parameter by its name in the model, possibly on the meta device."""
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
        parameters = inside | dict(self.model.named_parameters()) | outside
        return {name: value for name, value in parameters.items() if name in self.names.stored}

    def load_rest(self, away: bool = False) -> None:
        """Load everything outside the blocks, except towers of other modalities. Tied tensors stay one
        tensor. away: embedding and head stay on disk or in host memory if they can (`rows_away`).

        Raises QuantkitError if the architecture's blocks cannot run alone.
        """
        tensors, stored = self.model.state_dict(), self.names.stored.keys() | self.names.joined.keys()
        apart = self.rows_away() if away else {}
        state = {
            name: rows.Away(tensor, self.device)
            if name in apart.values()
            else self.read(name, tensor).to(self.device)
            for name, tensor in sorted(tensors.items(), key=lambda item: self._loader.offset(item[0]))
            if name in stored and not name.startswith(self.names.blocks + ".")
        }
        self.model.load_state_dict(state, strict=False, assign=True)
        self.model.tie_weights(missing_keys=tensors.keys() - stored, recompute_mapping=False)
        self.model.requires_grad_(False)
        on_host: dict[str, rows.Rows] = {}  # a tied head's rows are the embedding's
        for module, name in apart.items():
            read = partial(self._loader.rows, name, module.weight)
            if is_accelerator(self.device):
                if name not in on_host:
                    on_host[name] = rows.OnHost(module.weight, read, self.device)
                read = on_host[name]
            elif isinstance(module, nn.Embedding):
                for part in rows.slices(module.weight):
                    read(part)  # checks all rows, because forward passes read some; `learn` runs the head
            rows.stay_away(module, read)
        self._recorder.learn()

    def rows_away(self) -> dict[nn.Module, str]:
        """Return {module: its weight's name in the model} for embedding and head, if both can stay away from
        the memory that computes: neither is packed or computed, and the head is a plain linear. Else {}."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if not all(map(rows.can_stay_away, (embedding, head))):
            return {}
        modules = {module: f"{name}.weight" for name, module in self.model.named_modules()}
        tied, found = self.model.all_tied_weights_keys.items(), {}
        for module in (embedding, head):
            twins = {twin for pair in tied if modules[module] in pair for twin in pair}
            name = next((name for name in (modules[module], *twins) if name in self.names.stored), None)
            if name is None or not self.checkpoint.stores_rows(self.names.stored[name]):
                return {}
            found[module] = name
        return found

    def run_block(self, index: int, hidden: Tensor) -> Tensor:
        """Return the hidden states after block `index`. `hidden` must have the block's dtype. The head as a
        last block returns them unchanged."""
        with torch.no_grad():
            if index == self.depth:
                (head,) = self.blocks[index].values()
                head(self._recorder.head_inputs(hidden))
                return hidden
            return self._recorder.run(index, self.blocks[index], hidden)

    def trace_block(self, index: int, hidden: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Return `run_block` with `values` in place of the block's parameters, by their names in the block.
        autograd tracks `hidden` and `values`."""

        def block(*args, **kwargs):
            return functional_call(self.blocks[index], dict(values), args, kwargs)

        return self._recorder.run(index, block, hidden)

    def in_step(self, index: int, run: Callable[[int], T], count: int) -> Iterator[T]:
        """Yield `run(k)` for k below `count`; each call runs block `index`. If the block's experts are
        streamed, several calls run interleaved, so that each expert is read once for all of them."""
        keeper = self.keepers.get(index)
        return keeper.in_step(run, count) if keeper else map(run, range(count))

    def outputs(self, index: int, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the output of `run_block` for every batch of hidden states."""
        return self.in_step(index, lambda k: self.run_block(index, batches[k]), len(batches))

    def fetch_block(
        self, index: int, checkpoint: Checkpoint | None = None, decoded: bool = False
    ) -> FetchedBlock:
        """Read block `index` into host memory, for `load_block`. The device may compute meanwhile."""
        block, names = self.blocks[index], None
        if self.streams:
            experts = streaming.streamed(block)
            names = [name for name in block.state_dict() if name.rpartition(".")[0] not in experts]
        return self._loader_of(checkpoint).block(index, block, decoded, names)

    def _loader_of(self, checkpoint: Checkpoint | None) -> Loader:
        return replace(self._loader, checkpoint=checkpoint or self.checkpoint)

    def load_block(
        self,
        index: int,
        checkpoint: Checkpoint | None = None,
        decoded: bool = False,
        fetched: FetchedBlock | None = None,
    ) -> nn.Module:
        """Load the weights of block `index` and return the block. checkpoint: replaces the skeleton's own.
        fetched: the result of `fetch_block`, if it was called before.

        Packed linears compute as `install` says; with `decoded` they compute with the decoded weight and do
        not quantize activations.
        """
        block, loader = self.blocks[index], self._loader_of(checkpoint)
        loader.load(block, fetched or self.fetch_block(index, checkpoint, decoded))
        if self.streams and streaming.streamed(block):
            self.keepers[index] = Keeper(index, block, loader, decoded)
        return block

    def away(self, index: int) -> frozenset[str]:
        """Return the linears of a loaded block that are not in memory but read when called (streamed)."""
        return frozenset(streaming.streamed(self.blocks[index]) if index in self.keepers else ())

    def part(self, index: int, local: str) -> nn.Module:
        """Return module `local` of a loaded block with its weights in memory."""
        module = self.blocks[index].get_submodule(local)
        if isinstance(module, streaming.ExpertLinear) and module.keeper:
            return module.keeper.provide(module)
        return module

    def install(
        self,
        spec: LinearSpec,
        layout: Layout,
        packed: dict[str, Tensor],
        again: Callable[[], dict[str, Tensor]] | None = None,
        decoded: bool = False,
    ) -> Tensor:
        """Make a linear of a loaded block compute as clients of `layout` do with the packed tensors, and
        return the decoded weight `[out, in]`.

        If activations are quantized as well, the layout's own module replaces the linear, unless `decoded`.
        again: returns the packed tensors of a streamed expert whenever it is read again; None: they stay in
        memory.
        """
        self.part(spec.block, spec.local)

        def install(parts: dict[str, Tensor]) -> Tensor:
            block = self.blocks[spec.block]
            return self._loader.install(block, spec.local, layout, parts, spec.name, decoded)

        if keeper := self.keepers.get(spec.block):
            read = again or partial(dict, packed)
            keeper.keep(spec.local, lambda: install(self._loader.placed(read())))
        return install(packed)

    def free(self) -> None:
        """Release the memory of the whole model; its parameters return to the meta device."""
        rows.forget(self.model)
        self.model.to("meta")

    def free_block(self, index: int) -> None:
        """Release the memory of block `index`; its parameters return to the meta device. If
        the block is the head, the model's head takes over its weight."""
        if index == self.depth:
            (head,) = self.blocks[index].values()
            weight = nn.Parameter(head.weight, requires_grad=False)  # a layout's module has a plain tensor
            self.model.get_output_embeddings().weight = weight
        elif keeper := self.keepers.pop(index, None):
            keeper.close()
        loading.free(self.blocks[index])

    def stored_dtype(self, index: int, local: str) -> torch.dtype:
        """Return the stored dtype of a parameter of block `index`; for a packed linear, the model's own."""
        stored, checkpoint = self.names.stored_of(index, local), self.checkpoint
        if checkpoint.is_quantized(stored):
            declared = checkpoint.config.dtype
            return declared if isinstance(declared, torch.dtype) else self.dtype
        return DTYPES.get(checkpoint.infos[stored].dtype, self.dtype)

    def as_stored(self, index: int, local: str) -> tuple[str, Tensor]:
        """Return a parameter of block `index` as the checkpoint stores it: its stored name and its values."""
        owner, _, leaf = local.rpartition(".")
        tensor = getattr(self.part(index, owner), leaf).to(self.stored_dtype(index, local))
        transposed = self.names.of_block(index, local) in self.names.transposed
        return self.names.stored_of(index, local), tensor.t() if transposed else tensor
