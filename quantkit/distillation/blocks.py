"""Training block by block: each student block learns the output of the teacher's block, in constant memory.

    for each block:
        teacher's states ▶ teacher's block: target      student's states ▶ student's block: trained, staged

Memory holds one block of each model and both models' hidden states of all tokens. A student block reads the
output of the earlier student blocks, so it also corrects their errors. The teacher's block reads the output
of the earlier teacher blocks (docs/distill.md measures the other choice).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantkit.distillation.options import DistillOptions
from quantkit.distillation.student import Floats, Student, TracedBlock
from quantkit.distillation.training import Shares, order
from quantkit.models.files.reading import tensor as load_staged
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import divergence
from quantkit.quantize.calibrate.states import States, embedded
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.folder import Staging
from quantkit.quantize.timings import Timings

Pair = tuple[Sequence[Tensor], Sequence[Tensor]]  # inputs of a block and target outputs, by batch
SMALLEST = 1e-12  # least mean square of a token's states that errors are divided by


@dataclass(frozen=True)
class Training:
    """Both models, the options, and batches of token ids `[batch, tokens]`: to train on, and held out to
    measure improvement. seed: orders the batches."""

    teacher: Skeleton
    student: Student
    options: DistillOptions
    seed: int
    train: list[Tensor]
    held_out: list[Tensor]

    def divergence(self, expected: Iterable[Tensor], states: Iterable[Tensor], rest: Floats) -> float:
        """Return the student's mean KL divergence from the teacher in nats. expected, states: final hidden
        states of teacher and student on held-out text. rest: the student's floats outside the blocks."""
        logits = self.teacher.logits, partial(self.student.logits, rest=rest)
        vocabulary = self.student.checkpoint.text_config.vocab_size
        return divergence.of_tokens(*logits, zip(expected, states, strict=True), vocabulary).mean().item()


@dataclass(frozen=True)
class Final:
    """Results of the first stage. taught, teacher: the teacher's final hidden states for training text and
    for held-out text. before, after: the student's for held-out text, before and after training. floats: the
    student's, by names in the model."""

    taught: States
    teacher: States
    before: States
    after: States
    floats: Floats


def walk(training: Training, staging: Staging, timings: Timings, progress: Progress) -> Final:
    """Run both models block by block and train each student block; staged blocks are not trained again.
    Parameters outside the blocks must be loaded."""
    teacher, student, options = training.teacher, training.student, training.options
    done = staging.done(student.depth, progress.warn)
    progress.start(student.depth, sum(done))

    taught, theirs = embedded(teacher, training.train), embedded(teacher, training.held_out)
    before = embedded(student.skeleton, training.held_out)
    after, trained = before, ()  # without training, the states behind trained blocks are those before
    if options.block_epochs:
        after = embedded(student.skeleton, training.held_out)
        ours = embedded(student.skeleton, training.train)
        trained = after, ours
    floats: Floats = {}
    for index in range(student.depth):
        with timings("teacher"):
            teacher.load_block(index)
            for states in (taught, theirs):
                states.advance(list(teacher.outputs(index, states)))
            teacher.free_block(index)
        with student.block(index) as block:
            before.advance(student.outputs(block, before, block.floats))
            if done[index]:
                infos = staging.infos(index)
                device = student.skeleton.device
                current = {name: load_staged(infos[name]).to(device) for name in block.floats}
            elif options.block_epochs:
                with timings("blocks"):
                    current = _improved(training, block, (ours, taught), (after, theirs))
                staged = {name: value.detach().cpu().contiguous() for name, value in current.items()}
                staging.write_block(index, staged, [])
            else:
                current = block.floats
            for states in trained:
                states.advance(student.outputs(block, states, current))
            floats |= {block.prefix + name: value.cpu() for name, value in current.items()}
        progress.block(index, replayed=done[index])
    staging.wait()
    return Final(taught, theirs, before, after, floats)


def _improved(training: Training, block: TracedBlock, train: Pair, held_out: Pair) -> Floats:
    """Return the block's floats after training, rounded as stored; or the old floats if training did not
    lower the error on held-out text. train, held_out: inputs of the block and target outputs."""
    student, options = training.student, training.options
    inputs, targets = train
    steps = options.block_epochs * len(inputs)
    descent = Shares(block.floats, block.floats.keys() - block.dtypes.keys(), options.block_lr, steps)
    for epoch in range(options.block_epochs):
        for batch in order(len(inputs), training.seed, block.index, epoch):
            with torch.enable_grad():
                trained = student.run(block, inputs[batch], descent.values())
                error(trained, targets[batch]).mean().backward()
            descent.step()
    trained = block.stored({name: value.detach() for name, value in descent.values().items()})
    return min(block.floats, trained, key=partial(_mean_error, student, block, held_out))


def error(output: Tensor, target: Tensor) -> Tensor:
    """Return each token's squared error divided by its target's square, `[batch, tokens]`. In many models the
    states of a few tokens, such as the first, are a thousand times larger than others."""
    expected = target.float()
    return (output.float() - expected).square().mean(-1) / expected.square().mean(-1).clamp(min=SMALLEST)


def _mean_error(student: Student, block: TracedBlock, pair: Pair, floats: Floats) -> float:
    total, tokens = 0.0, 0
    inputs, targets = pair
    for output, target in zip(student.outputs(block, inputs, floats), targets, strict=True):
        each = error(output, target)
        total, tokens = total + each.sum().item(), tokens + each.numel()
    return total / tokens
