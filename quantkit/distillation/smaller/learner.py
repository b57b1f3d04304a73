"""Training of a smaller student on the teacher's predictions, as a whole model in memory.

The loss is `T² KL(teacher ‖ student)` of both logits divided by T (Hinton et al. 2015, arXiv 1503.02531,
section 2), over all tokens; plus the squared distance between the inputs of the heads, relative to their
size. The student is trained in float32, whatever it is stored in.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.distillation.descent import Descent
from quantkit.distillation.divergence import kl
from quantkit.distillation.options import SmallerOptions
from quantkit.distillation.smaller.targets import Prediction, Targets, entering

BETAS = 0.9, 0.95
CLIP = 1.0  # largest norm of a gradient
WARMUP = 0.1  # of the steps
STOPS = 10  # in a run, at which held-out text is tried and the state is saved
LOGITS_BYTES = 1 << 28  # float32 logits of a forward pass: more sequences are added up over several
STEP_TOKENS = 2048  # of a step, where nobody says how many sequences


@dataclass(frozen=True)
class Schedule:
    """The schedule of a training. batch: sequences of a step, `together` of them in one forward; every:
    steps between stops."""

    steps: int
    batch: int
    together: int
    every: int

    @staticmethod
    def of(
        options: SmallerOptions, trained: int, seqlen: int, vocabulary: int, batch: int | None
    ) -> Schedule:
        """Return the schedule of the options, for `trained` sequences."""
        batch = min(batch or max(1, STEP_TOKENS // seqlen), trained)
        fits = max(1, LOGITS_BYTES // (4 * vocabulary * seqlen))
        together = max(size for size in range(1, batch + 1) if batch % size == 0 and size <= fits)
        steps = options.steps or options.epochs * (trained // batch)
        return Schedule(steps, batch, together, max(1, math.ceil(steps / STOPS)))

    def rows(self, number: int, trained: int, seed: int) -> list[Tensor]:
        """Return the sequences of step `number`, those of each forward pass. An epoch's last step may have
        fewer."""
        passes, each = trained // self.together, self.batch // self.together
        epoch, place = divmod(number, -(-passes // each))
        order = torch.randperm(trained, generator=torch.Generator().manual_seed(seed + epoch))
        whole = order[: passes * self.together].split(self.together)
        return list(whole[place * each : (place + 1) * each])


class Learner:
    """A model in memory whose parameters that require gradients are trained in place.

    stored: returns these as they will be stored. bfloat16: the precision of the forward passes.
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

        adam = torch.optim.AdamW(self._parameters, lr=options.lr, betas=BETAS, weight_decay=0.0, fused=True)
        self.descent = Descent(trained, adam, rate)

    def predictions(self, ids: Tensor) -> Prediction:
        """Return the student's predictions for ids `[batch, tokens]`, in float32."""
        with torch.autocast(self._device.type, torch.bfloat16, self._bfloat16), entering(self.model) as found:
            logits = self.model(input_ids=ids.to(self._device), use_cache=False).logits
        return logits.float(), found[0].float()

    def step(self, number: int) -> None:
        """Train on one batch, in as many forward passes as its logits need; each epoch has another order."""
        self.model.train()
        torch.manual_seed(self._seed + number)  # of dropout, where a model has it
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
        """Return the mean divergence over the held-out sequences."""
        self.model.eval()
        total = 0.0
        for index in range(self.targets.trained, len(self.targets.ids)):
            expected = self.targets.predictions(torch.tensor([index]))[0].to(self._device)
            total += kl(expected, self.predictions(self.targets.ids[index : index + 1])[0]).mean().item()
        return total / self.targets.held_out


def loss(student: Prediction, teacher: Prediction, options: SmallerOptions) -> Tensor:
    """Return the mean over tokens."""
    (logits, hidden), (expected, states) = student, teacher
    found = options.temperature**2 * kl(expected, logits, options.temperature).mean()
    if options.hidden_weight:
        states = states.float()
        apart = (hidden.float() - states).square().sum(-1) / states.square().sum(-1).clamp(min=1e-12)
        found = found + options.hidden_weight * apart.mean()
    return found


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Use deterministic operations where torch has them; restore the random state afterwards."""
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
