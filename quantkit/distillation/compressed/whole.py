"""Training end to end: all floats at once, on the teacher's distribution of the next token.

The student's blocks are run forward without autograd, and only the input of each is kept; then backwards one
by one, each run again with autograd for the gradient that its output is given (checkpointing by block, Chen
et al. 2016, arXiv:1604.06174). So weights are decoded for one block at a time. Codes of all blocks are held
where they find room, else read again for every block that is run: slower, with the same result. Of the
teacher nothing is left but its head and its final hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from quantkit.distillation import divergence
from quantkit.distillation.compressed.blocks import Final, Text
from quantkit.distillation.compressed.student import Floats, Student
from quantkit.distillation.descent import Shares, order
from quantkit.distillation.options import DistillOptions
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate.backward import chunk_tokens, through_block, through_head


class EndToEnd:
    """The training of `start`, floats of all blocks and after, by names in the model. hold: keep
    the codes of all blocks in memory."""

    def __init__(
        self, teacher: Skeleton, student: Student, final: Final, start: Floats, text: Text,
        options: DistillOptions, seed: int, hold: bool,
    ):  # fmt: skip
        self.teacher, self.student, self.final, self.text = teacher, student, final, text
        self.options, self.seed, self.hold = options, seed, hold
        placed = {name: value.to(student.skeleton.device) for name, value in start.items()}
        self.steps = options.epochs * len(text.train)
        coded = start.keys() - student.skeleton.names.stored.keys()  # no parameters by themselves
        self.descent = Shares(placed, coded, options.lr, self.steps)
        self._vocabulary = student.checkpoint.text_config.vocab_size

    def step(self, number: int) -> None:
        """Train on one batch; each epoch has another order."""
        epoch, place = divmod(number, len(self.text.train))
        batch = order(len(self.text.train), self.seed, self.student.depth, epoch)[place]
        self._descend(self.text.train[batch], self.final.taught[batch], self.descent.values())
        self.descent.step()

    def divergence(self) -> float:
        """Return the divergence from the teacher on held-out text, of the student as it will be stored."""
        floats = {name: value.to(self.student.skeleton.device) for name, value in self.stored().items()}
        finals = (self._forward(ids, floats)[-1] for ids in self.text.held_out)
        rest = self._rest(floats)
        return divergence.mean(
            self.teacher.logits,
            lambda hidden: self.student.logits(hidden, rest),
            zip(self.final.teacher, finals, strict=True),
            self._vocabulary,
        )

    def stored(self) -> Floats:
        """Return the floats as they will be stored, on the host."""
        floats = {name: value.detach() for name, value in self.descent.values().items()}
        found = self.student.rest().stored(floats)
        for index in range(self.student.depth):
            with self.student.block(index, self.hold) as block:
                inside = block.stored(self._inside(index, floats))
            found |= {self._name(index, name): value for name, value in inside.items()}
        return {name: found[name].cpu().contiguous() for name in floats}

    def _forward(self, ids: Tensor, floats: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the input of every block, and the output of the last."""
        with torch.no_grad():
            flows = [self.student.skeleton.embed(ids)]
            for index in range(self.student.depth):
                with self.student.block(index, self.hold) as block:
                    flows.append(self.student.run(block, flows[-1], self._inside(index, floats)))
        return flows

    def _descend(self, ids: Tensor, taught: Tensor, floats: Floats) -> None:
        """Accumulate the gradient of a batch's mean divergence."""
        leaves = {name: value.detach().requires_grad_() for name, value in floats.items()}
        flows = self._forward(ids, leaves)
        gradient = self._through_head(taught, flows.pop(), self._rest(leaves))
        for index in reversed(range(self.student.depth)):
            with self.student.block(index, self.hold) as block:
                inside = self._inside(index, leaves)
                run = partial(self.student.run, block, floats=inside)
                gradient = through_block(run, flows.pop(), gradient)
        reached = [name for name, leaf in leaves.items() if leaf.grad is not None]
        torch.autograd.backward([floats[name] for name in reached], [leaves[name].grad for name in reached])

    def _through_head(self, taught: Tensor, final: Tensor, rest: Floats) -> Tensor:
        """Return the gradient of the final hidden states; logits are formed for some tokens at a time."""
        taught, tokens = taught.flatten(0, 1), final.shape[0] * final.shape[1]

        def loss(ours: Tensor, span: slice) -> Tensor:
            with torch.no_grad():
                expected = self.teacher.logits(taught[span])
            found = self.student.logits(ours, rest)
            temperature = self.options.temperature
            return (divergence.kl(expected, found, temperature) * temperature**2).sum() / tokens

        return through_head(final, chunk_tokens(self._vocabulary), loss)

    def _name(self, index: int, local: str) -> str:
        return self.student.skeleton.names.of_block(index, local)

    def _inside(self, index: int, floats: Mapping[str, Tensor]) -> Floats:
        """Return the floats of a block, by names in the block."""
        prefix = self._name(index, "")
        return {name.removeprefix(prefix): value for name, value in floats.items() if name.startswith(prefix)}

    def _rest(self, floats: Mapping[str, Tensor]) -> Floats:
        inside = f"{self.student.skeleton.names.blocks}."
        return {name: value for name, value in floats.items() if not name.startswith(inside)}
