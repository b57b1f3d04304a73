"""Training of a smaller student on the teacher's predictions; the whole student is in memory.

The loss is the mean over tokens of `T² KL(teacher ‖ student)`, with both logits divided by T (Hinton et al.
2015, arXiv 1503.02531, section 2), plus the relative squared distance between the inputs of both heads. The
student is trained in float32, whatever its stored type.

The teacher runs once, block by block, and is never whole in memory. Its final hidden states for all tokens
are stored in a memory-mapped file. They take less space than logits, which the teacher's norm and head
compute from them when needed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from quantkit.distillation.divergence import kl
from quantkit.distillation.options import SmallerOptions
from quantkit.distillation.training import Descent
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import walk
from quantkit.quantize.prepare import plan

GROUP_TOKENS = 1 << 18  # tokens whose states are in memory at a time; weights are read once per group

Prediction = tuple[Tensor, Tensor]  # logits [batch, tokens, vocabulary]; inputs of the head, [… , hidden]
ADAMW = 0.9, 0.95
CLIP = 1.0  # largest norm of a gradient
WARMUP = 0.1  # share of the steps
STOPS = 10  # evaluations on held-out text in a run
LOGITS_BYTES = 1 << 28  # maximum of a pass's float32 logits; larger steps take several passes
STEP_TOKENS = 2048  # tokens per step without --batch-size


@dataclass(frozen=True)
class Schedule:
    """The schedule of a training. steps: in total. batch: sequences per step; together: sequences per forward
    pass. every: steps between evaluations on held-out text (and saves)."""

    steps: int
    batch: int
    together: int
    every: int

    @staticmethod
    def of(
        options: SmallerOptions, trained: int, seqlen: int, vocabulary: int, batch: int | None
    ) -> Schedule:
        """Return the schedule for `trained` training sequences of `seqlen` tokens; batch: --batch-size."""
        batch = min(batch or max(1, STEP_TOKENS // seqlen), trained)
        fits = max(1, LOGITS_BYTES // (4 * vocabulary * seqlen))
        together = max(size for size in range(1, batch + 1) if batch % size == 0 and size <= fits)
        steps = options.steps or options.epochs * (trained // batch)
        return Schedule(steps, batch, together, max(1, math.ceil(steps / STOPS)))

    def rows(self, number: int, trained: int, seed: int) -> list[Tensor]:
        """Return the indices of step `number`'s sequences, one tensor per forward pass. An epoch's last step
        may have fewer."""
        passes, each = trained // self.together, self.batch // self.together
        epoch, place = divmod(number, -(-passes // each))
        order = torch.randperm(trained, generator=torch.Generator().manual_seed(seed + epoch))
        whole = order[: passes * self.together].split(self.together)
        return list(whole[place * each : (place + 1) * each])


class Learner:
    """A student in memory; its parameters that require gradients are trained in place.

    stored: returns the trained parameters in their stored types. bfloat16: compute forward passes in it.
    """

    def __init__(
        self, model: nn.Module, stored: Callable[[], dict[str, Tensor]], targets: Targets,
        options: SmallerOptions, schedule: Schedule, seed: int, bfloat16: bool,
    ):  # fmt: skip
        self.model, self.targets, self.options, self.schedule = model, targets, options, schedule
        self.stored = stored
        self._seed, self._bfloat16 = seed, bfloat16
        trained = {name: part for name, part in model.named_parameters() if part.requires_grad}
        self._parameters = list(trained.values())
        self._device = self._parameters[0].device
        up = math.ceil(WARMUP * schedule.steps)

        def rate(done: int) -> float:
            if done < up:
                return options.lr * (done / up)
            share = (done - up) / max(1, schedule.steps - up)
            return options.lr * (0.5 * (1 + math.cos(math.pi * share)))

        adam = torch.optim.AdamW(self._parameters, lr=options.lr, betas=ADAMW, weight_decay=0.0, fused=True)
        self.descent = Descent(trained, adam, rate)

    def predictions(self, ids: Tensor) -> Prediction:
        """Return the student's logits and inputs of the head for ids `[batch, tokens]`, in float32."""
        with torch.autocast(self._device.type, torch.bfloat16, self._bfloat16), entering(self.model) as found:
            logits = self.model(input_ids=ids.to(self._device), use_cache=False).logits
        return logits.float(), found[0].float()

    def step(self, number: int) -> None:
        """Train on the batch of step `number`, in several forward passes if its logits need much memory."""
        self.model.train()
        torch.manual_seed(self._seed + number)  # for dropout
        passes = self.schedule.rows(number, self.targets.trained, self._seed)
        for rows in passes:
            ids = self.targets.ids[rows]
            expected = tuple(part.to(self._device) for part in self.targets.predictions(rows))
            found = loss(self.predictions(ids), expected, self.options)
            (found / len(passes)).backward()
        nn.utils.clip_grad_norm_(self._parameters, CLIP)
        self.descent.step()

    @torch.no_grad()
    def divergence(self) -> float:
        """Return the mean KL divergence from the teacher over the held-out tokens, in nats."""
        self.model.eval()
        total = 0.0
        for index in range(self.targets.trained, len(self.targets.ids)):
            expected = self.targets.predictions(torch.tensor([index]))[0].to(self._device)
            total += kl(expected, self.predictions(self.targets.ids[index : index + 1])[0]).mean().item()
        return total / self.targets.held_out


def loss(student: Prediction, teacher: Prediction, options: SmallerOptions) -> Tensor:
    """Return the mean loss over all tokens; see the top of this file."""
    (logits, hidden), (expected, states) = student, teacher
    found = options.temperature**2 * kl(expected, logits, options.temperature).mean()
    if options.hidden_weight:
        states = states.float()
        apart = (hidden.float() - states).square().sum(-1) / states.square().sum(-1).clamp(min=1e-12)
        found = found + options.hidden_weight * apart.mean()
    return found


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Use deterministic operations where torch has them; restore settings and random state afterwards."""
    before, warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the next line, on CUDA
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


class Targets:
    """Text and the teacher's states. ids: int64 `[sequences, tokens]`; the last `held_out` sequences are held
    out. states: `[sequences, tokens, hidden]` in the teacher's dtype, mapped from a file."""

    def __init__(self, skeleton: Skeleton, ids: Tensor, held_out: int, states: Tensor):
        self._skeleton = skeleton
        self.ids, self.held_out, self.states = ids, held_out, states

    @property
    def trained(self) -> int:
        """Return the number of training sequences."""
        return len(self.ids) - self.held_out

    def predictions(self, sequences: Tensor) -> Prediction:
        """Return the teacher's logits and the head's inputs for sequences given by index, `[batch]`."""
        with entering(self._skeleton.model) as found:
            logits = torch.stack([self._skeleton.logits(self.states[index]) for index in sequences.tolist()])
        return logits, torch.cat(found)


@contextmanager
def entering(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list to which each forward pass adds the head's input, `[batch, tokens, hidden]`."""
    found: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda head, args: found.append(args[0]))
    try:
        yield found
    finally:
        hook.remove()


def nbytes(skeleton: Skeleton, tokens: int) -> int:
    """Return the size in bytes of the file with the teacher's states of `tokens` tokens."""
    return tokens * skeleton.checkpoint.text_config.hidden_size * skeleton.dtype.itemsize


def gather(
    skeleton: Skeleton, ids: Tensor, held_out: int, path: Path,
    listen: Callable[[int, int], None] = lambda done, total: None,
) -> Targets:  # fmt: skip
    """Run the teacher over `ids [sequences, tokens]`; return the targets. An existing file `path` is reused.

    Parameters outside the blocks must be loaded. The file appears whole or not at all.
    """
    shape = (*ids.shape, skeleton.checkpoint.text_config.hidden_size)
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        states, done = _mapped(temporary, shape, skeleton.dtype), 0
        groups = ids.split(max(1, GROUP_TOKENS // ids.shape[1]))
        blocks = len(skeleton.blocks) * len(groups)
        for number, group in enumerate(groups):
            batches = group.split(plan.default_batch_size(ids.shape[1]))
            base = number * len(skeleton.blocks)
            for hidden in walk.through(
                skeleton, batches, entered=lambda index, base=base: listen(base + index, blocks)
            ):
                states[done : done + len(hidden)] = hidden.cpu()
                done += len(hidden)
        listen(blocks, blocks)
        del states
        os.replace(temporary, path)
    return Targets(skeleton, ids, held_out, _mapped(path, shape, skeleton.dtype))


def _mapped(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor that is memory-mapped to the file."""
    size = torch.Size(shape).numel()
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)
