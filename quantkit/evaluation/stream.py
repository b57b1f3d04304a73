"""A model run block by block over any number of tokens: memory holds one block and the hidden states. Each
block may be quantized in memory, by a method that needs no text, to measure its loss without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import USAGE, QuantkitError, count, require
from quantkit.evaluation.kv_cache import KvCache, stored_scales
from quantkit.evaluation.memory import CHUNK_BYTES
from quantkit.evaluation.settings import trial_method
from quantkit.layouts import LinearSpec
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize import methods
from quantkit.quantize.calibrate import walk
from quantkit.quantize.calibrate.states import Place, States
from quantkit.quantize.methods import BuiltMethod
from quantkit.quantize.prepare import linears
from quantkit.quantize.solving import round_block

Listener = Callable[[str, int, int], None]  # model, blocks done, blocks in all


@dataclass(frozen=True)
class Trial:
    """A method that is applied to blocks when they are loaded. name: as typed, such as `fp4,solver=rtn`."""

    name: str
    method: BuiltMethod
    specs: list[LinearSpec]

    @staticmethod
    def prepare(typed: str, checkpoint: Checkpoint) -> Trial:
        """Parse `METHOD` or `METHOD,OPTION=VALUE,…` and check it against the checkpoint's shapes.

        Raises QuantkitError if the method is unknown, needs calibration or does not fit the shapes, or if the
        checkpoint is quantized already.
        """
        name = typed.partition(",")[0]
        method = trial_method(typed)
        if method.build().needs:
            hint = f"write it with quantkit {name}, then evaluate that folder"
            with suppress(QuantkitError):
                plain = f"{typed},solver=rtn,transform=none"
                if not trial_method(plain).build().needs:
                    hint = f"--as {plain} rounds to nearest, without text; or {hint}"
            what = f"--as {typed} needs calibration text, so it cannot be tried on the fly"
            raise QuantkitError(what, hint, USAGE)
        what = f"{checkpoint.source} is quantized already"
        require(not checkpoint.quantized, what, "give --as the original checkpoint", USAGE)
        skeleton = Skeleton(checkpoint, torch.float32, torch.device("cpu"))
        if opened := method.options.group_size is None:
            method = linears.fitted(skeleton, method, (), ())
            if (size := method.options.group_size) != methods.GROUP_SIZES[0]:
                typed += f",group_size={size}"
        built = method.build()
        specs = linears.resolve(skeleton, built.make_grid, built.layout, (), (), opened)
        if opened and (kept := linears.undivided(specs)):
            typed += f" ({count(len(kept), 'linear')} in 16 bit)"
        return Trial(typed, built, specs)


@dataclass(frozen=True)
class StreamedModel:
    """A checkpoint to run block by block. name: as in results, for example `./model as fp4,solver=rtn`,
    `./model, weights only` or `./model, kv q8_0`. trial: method to apply to each block. cache: quantized KV
    cache.

    weights_only: linears compute with decoded weights and do not quantize activations.
    """

    name: str
    skeleton: Skeleton
    trial: Trial | None = None
    cache: KvCache | None = None
    weights_only: bool = False

    @staticmethod
    def open(
        checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, trial: Trial | None = None,
        kv_dtype: str | None = None, weights_only: bool = False,
    ) -> StreamedModel:  # fmt: skip
        """Load everything except the blocks. kv_dtype: a name of `kv_types.TYPES`; None: `fp8` if the
        checkpoint stores scales for the cache, else no rounding. Raises QuantkitError, with names, if tensors
        are missing."""
        skeleton = Skeleton(checkpoint, dtype, device)
        skeleton.names.check_complete()
        skeleton.load_rest()
        scales = stored_scales(skeleton) if not (trial or weights_only) else {}
        chosen = kv_dtype or ("fp8" if scales else None)
        cache = KvCache(chosen, scales) if chosen else None
        name = f"{checkpoint.source} as {trial.name}" if trial else checkpoint.source
        name += ", weights only" * weights_only + (f", kv {kv_dtype}" if kv_dtype else "")
        return StreamedModel(name, skeleton, trial, cache, weights_only)

    def states(self, batches: Sequence[Tensor], listen: Listener, storage: Place | None = None) -> States:
        """Return final hidden states `[batch, tokens, hidden]` of each batch of ids `[batch, tokens]`.

        storage: where the states are between blocks."""
        count = len(self.skeleton.blocks)

        def entered(index: int) -> None:
            listen(self.name, index, count)
            if trial := self.trial:
                method = trial.method.solver, trial.method.layout
                round_block(self.skeleton, index, trial.specs, *method, self.weights_only)
            if self.cache:
                self.cache.attach(index, self.skeleton.blocks[index])

        states = walk.through(self.skeleton, batches, self.weights_only, entered, storage)
        listen(self.name, count, count)
        return states

    @property
    def kv(self) -> dict | None:
        """Describe the quantized cache after a run; None without one. Raises QuantkitError for a model
        without keys and values."""
        return self.cache.describe(self.name) if self.cache else None

    @property
    def chunk_tokens(self) -> int:
        """Return the number of tokens whose logits are computed at a time."""
        skeleton = self.skeleton
        return max(1, CHUNK_BYTES // (skeleton.dtype.itemsize * skeleton.checkpoint.text_config.vocab_size))
