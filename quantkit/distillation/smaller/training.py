"""Training the student on the teacher's predictions, by transformers' Trainer: its loop, checkpoints, resume.

The loss is `T² KL(teacher ‖ student)` of both logits divided by T (Hinton et al. 2015, arXiv 1503.02531,
section 2), over all tokens; beside it the squared distance of what enters the heads, relative to its size,
and with `lm_weight` the usual loss on the text's next token. The student is trained in float32, whatever it
is stored in. Of what was tried on held-out text along the way, the best is kept.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import _IncompatibleKeys
from transformers.trainer_callback import PrinterCallback

from quantkit.distillation.smaller.blocks import kl
from quantkit.distillation.smaller.options import Options
from quantkit.distillation.smaller.targets import Prediction, Targets, entering, write_json

BETAS = 0.9, 0.95
CLIP = 1.0  # largest norm of a gradient
WARMUP = 0.1  # of the steps
STOPS = 10  # in a run, at which held-out text is tried and a checkpoint is made
LOGITS_BYTES = 1 << 28  # float32 logits of a forward pass: more sequences are added up over several
STEP_TOKENS = 2048  # of a step, where nobody says how many sequences


@dataclass(frozen=True)
class Data:
    """ids: int64 `[sequences, tokens]`. targets: of all of them. held_out: how many, at the end, are not
    trained on."""

    ids: Tensor
    targets: Targets
    held_out: int

    @property
    def trained(self) -> int:
        """Sequences that are trained on."""
        return len(self.ids) - self.held_out


@dataclass(frozen=True)
class Schedule:
    """batch: sequences of a step, `together` of them in one forward; every: steps between stops."""

    steps: int
    batch: int
    together: int
    every: int

    @staticmethod
    def of(options: Options, trained: int, seqlen: int, vocabulary: int, batch: int | None) -> Schedule:
        """As long as the options say, for `trained` sequences."""
        batch = min(batch or max(1, STEP_TOKENS // seqlen), trained)
        fits = max(1, LOGITS_BYTES // (4 * vocabulary * seqlen))
        together = max(size for size in range(1, batch + 1) if batch % size == 0 and size <= fits)
        steps = options.steps or options.epochs * (trained // batch)
        return Schedule(steps, batch, together, max(1, math.ceil(steps / STOPS)))


class Student(nn.Module):
    """The model as the Trainer sees it: ids in, predictions out. Its state is what is trained, tied tensors
    once."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Prediction:
        """What it predicts for ids `[batch, tokens]`."""
        with entering(self.model) as found:
            logits = self.model(input_ids=ids, use_cache=False).logits
        return logits, found[0]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.named_parameters() if p.requires_grad}

    def load_state_dict(self, state: Mapping[str, Tensor], *_: Any, **__: Any) -> _IncompatibleKeys:
        """The inverse: nothing is missing that is tied to something else, or not trained."""
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, tensor in state.items():
                own[name].copy_(tensor)
        return _IncompatibleKeys([], [])


class Distiller(transformers.Trainer):
    """The Trainer, with the loss of distillation. best: the state that did best on held-out text, and where
    that is told."""

    def __init__(
        self, student: Student, data: Data, options: Options, arguments: transformers.TrainingArguments
    ):
        sequences = [{"index": index, "ids": data.ids[index]} for index in range(data.trained)]
        super().__init__(student, arguments, train_dataset=sequences, eval_dataset=sequences[:0])
        self.remove_callback(PrinterCallback)
        self.data, self.options = data, options
        self.best = Path(arguments.output_dir) / "best.safetensors"

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any
    ) -> Tensor:
        """Of a batch {ids `[batch, tokens]`, index `[batch]`}, in nats a token."""
        ids, index = inputs["ids"], inputs["index"].cpu()
        expected = tuple(part.to(ids.device) for part in self.data.targets.predictions(index))
        return loss(model(ids), expected, ids, self.options)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The divergence on held-out text; a state that did better than all before is kept in a file."""
        found = held_out(self.model, self.data)
        told, finite = self.best.with_suffix(".json"), math.isfinite(found)
        if finite and (not told.exists() or found < _best(told)["kld"]):
            _save(self.best, self.model.state_dict())
            write_json(told, {"kld": found, "step": self.state.global_step})
        metrics = {"eval_kld": found if finite else None}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.control.should_training_stop |= not finite  # nothing comes back from there
        return metrics


def loss(student: Prediction, teacher: Prediction, ids: Tensor, options: Options) -> Tensor:
    """Mean over tokens; ids `[batch, tokens]`."""
    (logits, hidden), (expected, states) = student, teacher
    found = options.temperature**2 * kl(expected, logits, options.temperature).mean()
    if options.hidden_weight:
        states = states.float()
        apart = (hidden.float() - states).square().sum(-1) / states.square().sum(-1).clamp(min=1e-12)
        found = found + options.hidden_weight * apart.mean()
    if options.lm_weight:
        following = cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        found = found + options.lm_weight * following
    return found


@torch.no_grad()
def held_out(student: nn.Module, data: Data) -> float:
    """Mean KL divergence from the teacher on the sequences that are not trained on, in nats."""
    student.eval()
    device, total = next(student.parameters()).device, 0.0
    for index in range(data.trained, len(data.ids)):
        expected = data.targets.predictions(torch.tensor([index]))[0].to(device)
        total += kl(expected, student(data.ids[index : index + 1].to(device))[0]).mean().item()
    student.train()
    return total / data.held_out


def train(
    model: nn.Module,
    data: Data,
    options: Options,
    schedule: Schedule,
    folder: Path,
    seed: int,
    bfloat16: bool,
    resume: bool,
    listen: Callable[[int, int], None],
) -> tuple[dict[str, Tensor], dict]:
    """Train in place what requires gradients. Returns the best state, by name in
    the model, and a record; an empty one where all that was tried had diverged.

    folder: of the Trainer's checkpoints, from the last of which `resume` goes on. bfloat16: the precision of
    the student's forward passes.
    """
    student = Student(model)
    device = next(student.parameters()).device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where the Trainer goes
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=schedule.steps,
        per_device_train_batch_size=schedule.together,
        gradient_accumulation_steps=schedule.batch // schedule.together,
        dataloader_drop_last=True,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=math.ceil(WARMUP * schedule.steps),
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=0.0,
        max_grad_norm=CLIP,
        eval_strategy="steps",
        save_strategy="steps",
        logging_strategy="steps",
        eval_steps=schedule.every,
        save_steps=schedule.every,
        logging_steps=schedule.every,
        save_total_limit=1,
        bf16=bfloat16,
        use_cpu=device.type == "cpu",
        seed=seed,
        data_seed=seed,
        remove_unused_columns=False,
        dataloader_pin_memory=device.type == "cuda",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
    arguments._n_gpu = 1  # one process, one device
    with deterministic(device):
        trainer = Distiller(student, data, options, arguments)
        trainer.add_callback(_Steps(listen))
        checkpoint = last_checkpoint(folder) if resume else None
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    told = trainer.best.with_suffix(".json")
    record = {
        "best": _best(told) if told.exists() else {"kld": None, "step": 0},
        "curve": [
            {"step": row["step"], "kld": row["eval_kld"]}
            for row in trainer.state.log_history
            if "eval_kld" in row
        ],
    }
    state = load_file(trainer.best) if told.exists() else {}
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}, record


def last_checkpoint(folder: Path) -> Path | None:
    """The newest of the Trainer's checkpoints that is whole: its state is written last."""
    found = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Operations that give the same result twice, where there are such; the random state comes back."""
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


class _Steps(transformers.TrainerCallback):
    """Tells of every step."""

    def __init__(self, listen: Callable[[int, int], None]):
        self._listen = listen

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._listen(state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._listen(state.global_step, state.max_steps)


def _best(path: Path) -> dict:
    return json.loads(path.read_text())


def _save(path: Path, state: dict[str, Tensor]) -> None:
    temporary = path.with_suffix(".tmp")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, temporary)
    os.replace(temporary, path)
