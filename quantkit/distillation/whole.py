"""Training end to end: all floats at once, on the teacher's distribution of the next token.

The student's blocks run forward without autograd, and only the input of each block is kept. Then the blocks
run again, the last one first, with autograd, which turns the gradient of a block's output into that of its
input (checkpointing by block, Chen et al. 2016, arXiv:1604.06174). So weights are decoded for one block at a
time. The codes of all blocks stay in memory if they fit; otherwise each run of a block reads them again: this
is slower and gives the same result. Memory holds only the head and the final hidden states of the teacher.
"""

import math
import time
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from quantkit.distillation.blocks import Final, Training
from quantkit.distillation.student import Floats
from quantkit.distillation.training import Shares, order
from quantkit.models.files import safetensors_folder
from quantkit.models.files.reading import tensor as load
from quantkit.models.machine.device import free_memory
from quantkit.quantize.calibrate import LOGITS_BYTES, LOGITS_TOKENS, divergence
from quantkit.quantize.calibrate.backward import chunk_tokens, through_block, through_head
from quantkit.quantize.prepare.plan import check_memory
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.blocks import save
from quantkit.quantize.staging.folder import Staging

FLOAT32 = 4
TRACED_BYTES = 1 + 4 * FLOAT32  # bytes per weight of the running block: code, level, value and two gradients
LOGITS = 6  # copies at a time: of both models, their log-probabilities, and two terms of the divergence
CODE_BYTES = 2  # bytes per weight of all blocks: code, trained floats and their moments
MEMORY_SHARE = 0.8  # share of free memory up to which all codes stay in memory
SAVE_SECONDS = 60.0  # between two saves for --resume, which do not affect the result
SAVE_SHARE = 20  # saving takes at most 1/20 of the time
BEST = "best.safetensors"

Curve = dict[int, float]  # {steps done: divergence on held-out text}


class EndToEnd:
    """The second stage of training. start: floats of the blocks and of the rest, by names in the model. hold:
    keep the codes of all blocks in memory."""

    def __init__(self, training: Training, final: Final, start: Floats, hold: bool):
        self.training, self.final, self.hold = training, final, hold
        self.teacher, self.student = training.teacher, training.student
        student, options = training.student, training.options
        placed = {name: value.to(student.skeleton.device) for name, value in start.items()}
        self.steps = options.epochs * len(training.train)
        coded = start.keys() - student.skeleton.names.stored.keys()  # not parameters by themselves
        self.descent = Shares(placed, coded, options.lr, self.steps)
        self.rest = student.rest()
        self._vocabulary = student.checkpoint.text_config.vocab_size

    def train(self, begun: float, staging: Staging, progress: Progress) -> Curve:
        """Make all steps; return {step: divergence}. After every epoch, evaluate the student; store it in
        BEST if it is the best so far and below `begun`, the divergence at the start. End early if no
        evaluation was below `begun`, or if the loss is not finite. Continue what an interrupted run staged.
        """
        curve: Curve = {}
        state = {name: load(info) for name, info in staging.rest().items()}
        if "done" in state:
            self.descent.restore(state)
            curve = dict(zip(state["stops"].tolist(), state["divergences"].tolist(), strict=True))
        saved, took = time.monotonic(), 0.0
        while (done := self.descent.done) < self.steps and not _failed(curve, begun):
            progress.counting(_progress(curve), done, self.steps)
            self.step(done)
            done += 1
            if stops := done % len(self.training.train) == 0 or done == self.steps:
                loss, least = self.divergence(), min([begun, *curve.values()])
                curve[done] = loss
                if loss < least:
                    save(staging.folder / BEST, self.stored())
            if stops or time.monotonic() - saved > max(SAVE_SECONDS, SAVE_SHARE * took):
                began = time.monotonic()
                looks = torch.tensor(list(curve)), torch.tensor(list(curve.values()), dtype=torch.float64)
                staging.write_rest(self.descent.state() | {"stops": looks[0].long(), "divergences": looks[1]})
                saved, took = time.monotonic(), time.monotonic() - began
        progress.counting(_progress(curve), self.descent.done, self.steps)
        return curve

    def step(self, number: int) -> None:
        """Train on batch number `number`; each epoch has another order."""
        epoch, position = divmod(number, len(self.training.train))
        batch = order(len(self.training.train), self.training.seed, self.student.depth, epoch)[position]
        self._descend(self.training.train[batch], self.final.taught[batch], self.descent.values())
        self.descent.step()

    def divergence(self) -> float:
        """Return the stored student's mean KL divergence from the teacher on held-out text, in nats."""
        floats = {name: value.to(self.student.skeleton.device) for name, value in self.stored().items()}
        finals = (self._forward(ids, floats)[-1] for ids in self.training.held_out)
        return self.training.divergence(self.final.teacher, finals, self.rest.of_model(floats))

    def stored(self) -> Floats:
        """Return the floats after rounding to their stored types, on the CPU."""
        floats = {name: value.detach() for name, value in self.descent.values().items()}
        stored = self.rest.stored(floats)
        for index in range(self.student.depth):
            with self.student.block(index, self.hold) as block:
                inside = block.stored(block.of_model(floats))
            stored |= {block.prefix + name: value for name, value in inside.items()}
        return {name: stored[name].cpu().contiguous() for name in floats}

    def _forward(self, ids: Tensor, floats: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the input of every block and the output of the last, without gradients."""
        with torch.no_grad():
            flows = [self.student.skeleton.embed(ids)]
            for index in range(self.student.depth):
                with self.student.block(index, self.hold) as block:
                    flows.append(self.student.run(block, flows[-1], block.of_model(floats)))
        return flows

    def _descend(self, ids: Tensor, taught: Tensor, floats: Floats) -> None:
        """Add the gradient of a batch's mean divergence. taught: the teacher's final hidden states."""
        leaves = {name: value.detach().requires_grad_() for name, value in floats.items()}
        flows = self._forward(ids, leaves)
        gradient = self._through_head(taught, flows.pop(), self.rest.of_model(leaves))
        for index in reversed(range(self.student.depth)):
            with self.student.block(index, self.hold) as block:
                run = partial(self.student.run, block, floats=block.of_model(leaves))
                gradient = through_block(run, flows.pop(), gradient)
        reached = [name for name, leaf in leaves.items() if leaf.grad is not None]
        torch.autograd.backward([floats[name] for name in reached], [leaves[name].grad for name in reached])

    def _through_head(self, taught: Tensor, final: Tensor, rest: Floats) -> Tensor:
        """Return the loss's gradient by the final hidden states; logits exist for some tokens at a time."""
        taught, tokens = taught.flatten(0, 1), final.shape[0] * final.shape[1]

        def loss(ours: Tensor, span: slice) -> Tensor:
            with torch.no_grad():
                expected = self.teacher.logits(taught[span])
            logits = self.student.logits(ours, rest)
            temperature = self.training.options.temperature
            return (divergence.kl(expected, logits, temperature) * temperature**2).sum() / tokens

        return through_head(final, chunk_tokens(self._vocabulary), loss)


def best_step(curve: Curve, begun: float) -> int:
    """Return the step with the lowest divergence; 0 if none is below `begun`."""
    return min((step for step in curve if curve[step] < begun), key=curve.get, default=0)


def best(staging: Staging) -> dict[str, Tensor]:
    """Return the tensors of the best student, which `EndToEnd.train` stored."""
    return {name: load(info) for name, info in safetensors_folder.read_header(staging.folder / BEST).items()}


def _failed(curve: Curve, begun: float) -> bool:
    """Return whether training has failed: no evaluation below `begun`, or the last one not finite."""
    return bool(curve) and (not best_step(curve, begun) or not math.isfinite(list(curve.values())[-1]))


def _progress(curve: Curve) -> str:
    return "end to end" + (f", held-out KL {list(curve.values())[-1]:.5f}" if curve else "")


def plan_memory(training: Training) -> dict[str, int | bool]:
    """Return peak bytes above the interpreter: `blocks` of the stage block by block, `whole` of the stage end
    to end (0 if it is left out). hold: whether the codes of all blocks fit in memory.

    Raises QuantkitError (exit code 5) if not even one block's codes fit.
    """
    teacher, student, options = training.teacher, training.student, training.options
    element, free = teacher.dtype.itemsize, free_memory(teacher.device)
    sizes = [sum(p.numel() for p in block.parameters()) for block in student.skeleton.blocks]
    inside, largest = sum(sizes), max(sizes)
    outside = sum(skeleton.parameters - inside for skeleton in (teacher, student.skeleton)) * element
    batch = training.train[0].numel()
    train, held_out = (sum(part.numel() for part in parts) for parts in (training.train, training.held_out))
    width = teacher.checkpoint.text_config.hidden_size * element
    matrices = [p.shape for p in student.skeleton.blocks[0].parameters() if p.ndim == 2]
    tracing = largest * TRACED_BYTES + 3 * FLOAT32 * batch * sum(sum(shape) for shape in matrices)
    states = width * (2 * train + 3 * held_out + batch * (student.depth + 2))
    one = min(FLOAT32 * LOGITS_TOKENS * student.checkpoint.text_config.vocab_size, LOGITS_BYTES)
    logits = LOGITS * one
    need = outside + tracing + states + logits
    hold = bool(options.epochs) and need + CODE_BYTES * inside <= MEMORY_SHARE * free
    remedy = "fewer --samples, shorter --seqlen or a smaller --batch-size"
    check_memory(need, free, remedy, teacher.device)
    whole = need + CODE_BYTES * inside * hold if options.epochs else 0
    return {"blocks": need, "whole": whole, "hold": hold}
