"""End to end: all floats of the student at once, towards the teacher's distribution of the next token.

The student's blocks are run forward without autograd, and only what enters each is kept; then backwards one
by one, each run again with autograd for the gradient that its output is given (checkpointing by block, Chen
et al. 2016, arXiv:1604.06174). So weights are decoded for one block at a time. Codes of all blocks are held
where they find room, else read again for every block that is run: slower, with the same result. Of the
teacher nothing is left but its head and its final hidden states.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantkit.distillation import divergence
from quantkit.distillation.blocks import Final, Text
from quantkit.distillation.descent import Descent, order
from quantkit.distillation.student import Floats, Student
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate.backward import chunk_tokens, through_block, through_head
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.folder import Staging
from quantkit.quantize.staging.folder import load as load_staged

SAVE_SECONDS = 60.0  # between two states that --resume could go on from; when they are saved changes no byte


@dataclass(frozen=True)
class Plan:
    """hold: keep the codes of all blocks in memory."""

    epochs: int
    lr: float
    temperature: float
    seed: int
    hold: bool


@dataclass(frozen=True)
class Learned:
    """floats: by name in the model, as they will be stored. divergences: held out, after each epoch. epoch:
    the best, from 1; 0 where none was better than what it began with."""

    floats: Floats
    divergences: list[float]
    epoch: int


class EndToEnd:
    """Trains `start`, floats of all blocks and of what follows them by their names in the model."""

    def __init__(self, teacher: Skeleton, student: Student, final: Final, start: Floats, plan: Plan):
        self.teacher, self.student, self.final, self.plan = teacher, student, final, plan
        self.start = start
        device = student.skeleton.device
        self._start = {name: value.to(device) for name, value in start.items()}
        self._vocabulary = student.checkpoint.text_config.vocab_size

    def run(self, text: Text, best: float, staging: Staging, progress: Progress) -> Learned:
        """The floats of the epoch with the least divergence on held-out text, if that is below `best`."""
        plan, count = self.plan, len(text.train)
        descent = Descent(self._start, self._coded(), plan.lr, plan.epochs * count)
        learned, divergences = (dict(self.start), 0), []
        if state := _saved(staging):
            descent.restore(state)
            divergences = state["divergences"].tolist()
            learned = {name: state[f"best.{name}"] for name in self.start}, int(state["epoch"])
            best = min([best, *divergences])
        saved = time.monotonic()
        while descent.done < plan.epochs * count and (learned[1] or not divergences):  # else it got worse
            epoch, place = divmod(descent.done, count)
            reached = f", held-out KL {divergences[-1]:.5f}" if divergences else ""
            progress.counting(f"end to end{reached}", descent.done, plan.epochs * count)
            batch = order(count, plan.seed, self.student.depth, epoch)[place]
            self._descend(text.train[batch], self.final.taught[batch], descent.values())
            descent.step()
            if place + 1 == count:
                found = self._stored(descent.values())
                divergences.append(self.divergence(text.held_out, found))
                progress.phase(f"epoch {epoch + 1}/{plan.epochs}: held-out KL {divergences[-1]:.5f}")
                if divergences[-1] < best:
                    best, learned = divergences[-1], (found, epoch + 1)
            if place + 1 == count or time.monotonic() - saved > SAVE_SECONDS:
                kept = {f"best.{name}": value for name, value in learned[0].items()}
                told = {"divergences": torch.tensor(divergences, dtype=torch.float64)}
                staging.write_rest(descent.state() | kept | told | {"epoch": torch.tensor(learned[1])})
                saved = time.monotonic()
        return Learned(learned[0], divergences, learned[1])

    def divergence(self, batches: Sequence[Tensor], floats: Floats) -> float:
        """From the teacher, on the held-out text."""
        device = self.student.skeleton.device
        placed = {name: value.to(device) for name, value in floats.items()}
        pairs = zip(self.final.teacher, (self._forward(ids, placed)[-1] for ids in batches), strict=True)
        rest = self._rest(placed)
        head = self.student.logits
        return divergence.mean(
            self.teacher.logits, lambda hidden: head(hidden, rest), pairs, self._vocabulary
        )

    def _forward(self, ids: Tensor, floats: Mapping[str, Tensor]) -> list[Tensor]:
        """What enters every block, and what leaves the last."""
        with torch.no_grad():
            flows = [self.student.skeleton.embed(ids)]
            for index in range(self.student.depth):
                with self.student.block(index, self.plan.hold) as block:
                    flows.append(self.student.run(block, flows[-1], self._inside(index, floats)))
        return flows

    def _descend(self, ids: Tensor, taught: Tensor, floats: Floats) -> None:
        """Leave the gradient of a batch's mean divergence with what `floats` were made of."""
        leaves = {name: value.detach().requires_grad_() for name, value in floats.items()}
        flows = self._forward(ids, leaves)
        gradient = self._through_head(taught, flows.pop(), self._rest(leaves))
        for index in reversed(range(self.student.depth)):
            with self.student.block(index, self.plan.hold) as block:
                inside = self._inside(index, leaves)
                run = partial(self.student.run, block, floats=inside)
                gradient = through_block(run, flows.pop(), gradient)
        reached = [name for name, leaf in leaves.items() if leaf.grad is not None]
        torch.autograd.backward([floats[name] for name in reached], [leaves[name].grad for name in reached])

    def _through_head(self, taught: Tensor, final: Tensor, rest: Floats) -> Tensor:
        """The gradient of the final hidden states; logits are formed for some tokens at a time."""
        taught, tokens = taught.flatten(0, 1), final.shape[0] * final.shape[1]

        def loss(ours: Tensor, span: slice) -> Tensor:
            with torch.no_grad():
                expected = self.teacher.logits(taught[span])
            found = self.student.logits(ours, rest)
            return divergence.of_logits(expected, found, self.plan.temperature).sum() / tokens

        return through_head(final, chunk_tokens(self._vocabulary), loss)

    def _coded(self) -> set[str]:
        """Names of what goes with codes."""
        found = set()
        for index in range(self.student.depth):
            with self.student.block(index, self.plan.hold) as block:
                found |= {self._name(index, name) for name in block.floats if name not in block.dtypes}
        return found

    def _stored(self, floats: Floats) -> Floats:
        """As they will be stored, on the host."""
        floats = {name: value.detach() for name, value in floats.items()}
        found = self.student.rest_stored(self._rest(floats))
        for index in range(self.student.depth):
            with self.student.block(index, self.plan.hold) as block:
                inside = block.stored(self._inside(index, floats))
            found |= {self._name(index, name): value for name, value in inside.items()}
        return {name: found[name].cpu().contiguous() for name in floats}

    def _name(self, index: int, local: str) -> str:
        return self.student.skeleton.names.of_block(index, local)

    def _inside(self, index: int, floats: Mapping[str, Tensor]) -> Floats:
        """Those of a block, by their names in it."""
        prefix = self._name(index, "")
        return {name.removeprefix(prefix): value for name, value in floats.items() if name.startswith(prefix)}

    def _rest(self, floats: Mapping[str, Tensor]) -> Floats:
        inside = f"{self.student.skeleton.names.blocks}."
        return {name: value for name, value in floats.items() if not name.startswith(inside)}


def _saved(staging: Staging) -> dict[str, Tensor]:
    """The state that an earlier run has left; {} where there is none."""
    return {name: load_staged(info) for name, info in staging.rest().items()}
