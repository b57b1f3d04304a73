"""A model run block by block over any number of tokens: none of it is held whole, only hidden states are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.evaluation.trial import Trial
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize import walk
from quantkit.quantize.states import States

CHUNK_BYTES = 1 << 26  # float32 logits held at a time, per model

Listener = Callable[[str, int, int], None]  # model, blocks done, blocks in all


@dataclass(frozen=True)
class StreamedModel:
    """A checkpoint, or what a trial makes of it. name: as results call it.

    errors: relative squared errors of the weights that the trial quantized, known once it has run.
    """

    name: str
    skeleton: Skeleton
    trial: Trial | None = None
    errors: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def open(
        checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, trial: Trial | None = None
    ) -> StreamedModel:
        """Load all but the blocks. Raises QuantkitError naming tensors that are absent."""
        skeleton = Skeleton(checkpoint, dtype, device)
        skeleton.names.check_complete()
        skeleton.load_rest()
        return StreamedModel(named(checkpoint, trial), skeleton, trial)

    def states(self, batches: Sequence[Tensor], listen: Listener) -> States:
        """Final hidden states `[batch, tokens, hidden]` of every batch of ids `[batch, tokens]`."""
        count = len(self.skeleton.blocks)

        def entered(index: int) -> None:
            listen(self.name, index, count)
            if self.trial:
                self.errors.update(self.trial.apply(self.skeleton, index))

        states = walk.through(self.skeleton, batches, entered=entered)
        listen(self.name, count, count)
        return states

    def log_probs(self, hidden: Tensor) -> Tensor:
        """float32 `[tokens, vocabulary]` of final hidden states `[tokens, hidden]`."""
        return torch.log_softmax(self.skeleton.logits(hidden).float(), -1)

    @property
    def chunk_tokens(self) -> int:
        """How many tokens' logits are held at a time."""
        return max(1, CHUNK_BYTES // (4 * self.skeleton.checkpoint.text_config.vocab_size))


def named(checkpoint: Checkpoint, trial: Trial | None) -> str:
    """`./model as nf4` for a trial."""
    return f"{checkpoint.source} as {trial.method.name}" if trial else checkpoint.source
