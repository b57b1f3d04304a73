"""The loss of a finished output: its KL divergence from the original model on a few tokens kept out of the
calibration.

Errors of single linears are relative to all tokens together, so a massive first token decides them, and they
do not show how errors add up. The KL divergence compares the predictions of the whole model, token by token.

The original model runs block by block. Meanwhile the same tokens run through a second model, whose blocks are
rounded to nearest: error feedback that loses more than this failed. Log-probabilities of the original are
kept, so the two models are never in memory together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import LOSS_BYTES, divergence, walk
from quantkit.quantize.job import Job
from quantkit.quantize.outputs import Loss
from quantkit.quantize.solvers.rtn import RtnSolver
from quantkit.quantize.solving import round_block
from quantkit.text.calibration import HeldBack

LARGE = 1.0  # nats: above, the output predicts little like the original
NOISE = 0.01  # nats that 16-bit arithmetic alone may cost
ABOVE = 1.2  # times the loss of round to nearest: less may be chance
REMEDIES = {"target": "own", "transform": "none", "solver": "rtn"}  # of error feedback that fails


@dataclass(frozen=True)
class Expected:
    """Predictions of the original model for the tokens that all jobs of a command are measured on. log_probs:
    float32 `[tokens, vocabulary]` on the host. rtn_kld: see Loss."""

    held_back: HeldBack
    log_probs: Tensor
    rtn_kld: float | None


def of_original(job: Job) -> Expected:
    """Run the held-back tokens of a job through its source. All but one block is on the meta device."""
    skeleton = Skeleton(job.checkpoint, job.skeleton.dtype, job.skeleton.device)
    skeleton.streams = job.skeleton.streams
    skeleton.load_rest()
    hidden = rounded = skeleton.embed(job.held_back.tokens)
    outside = any(row.embedding or row.block >= skeleton.depth for row in job.specs)
    compared = "hessian" in job.method.needs and "peak" not in job.method.layout.needs and not outside
    for index, _ in walk.blocks(skeleton, lambda index: (None, True)):
        hidden = skeleton.run_block(index, hidden)
        if compared:
            round_block(skeleton, index, job.specs, RtnSolver(), job.method.layout)
            rounded = skeleton.run_block(index, rounded)
    log_probs = torch.cat(list(_log_probs(skeleton, hidden)))
    kld = _compared(log_probs, skeleton, rounded)[0].mean().item() if compared else None
    skeleton.model.to("meta")
    return Expected(job.held_back, log_probs, kld)


def of_output(expected: Expected, skeleton: Skeleton, hidden: Tensor) -> Loss:
    """Return the loss. skeleton: of the output. hidden: its final states of the held-back tokens,
    `[batch, tokens, hidden]`."""
    kld, same = _compared(expected.log_probs, skeleton, hidden)
    figures = kld.mean(), kld.std() / len(kld) ** 0.5, same.mean(), expected.rtn_kld
    # rounded, so that the last digits of sums do not change the manifest
    figures = (None if value is None else float(f"{value:.3g}") for value in figures)
    return Loss(*figures, len(same), expected.held_back.text)


def warning(loss: Loss, options: Any) -> str | None:
    """Return a warning if a loss is above that of round to nearest, or above LARGE; else None. options: of
    the method."""
    if loss.rtn_kld is not None and loss.kld > ABOVE * loss.rtn_kld + NOISE:
        other = [name for name, value in REMEDIES.items() if getattr(options, name, value) != value]
        tries = " or ".join(f"--{name} {REMEDIES[name]}" for name in other) or "another method"
        return (
            f"the output loses more than round to nearest: KL divergence {loss.kld:.3g} against "
            f"{loss.rtn_kld:.3g}; try {tries}, and please report the model"
        )
    if loss.kld > LARGE:
        return (
            f"the output predicts little like the original: KL divergence {loss.kld:.3g}; try more bits, "
            "smaller groups or quantkit auto"
        )
    return None


def _compared(expected: Tensor, skeleton: Skeleton, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the KL divergence of each token, and 1.0 where both models predict the same token, else 0.0."""
    kld, same, start = [], [], 0
    for found in _log_probs(skeleton, hidden):
        theirs = expected[start : start + len(found)]
        kld.append(divergence.of_log_probs(theirs, found))
        same.append((theirs.argmax(-1) == found.argmax(-1)).float())
        start += len(found)
    return torch.cat(kld), torch.cat(same)


def _log_probs(skeleton: Skeleton, hidden: Tensor) -> Iterator[Tensor]:
    """Yield log-probabilities `[tokens, vocabulary]` on the host, some tokens of one sequence at a time: a
    model may have no more positions."""
    size = max(1, LOSS_BYTES // (4 * skeleton.checkpoint.text_config.vocab_size))
    for part in (part for sequence in hidden for part in sequence.split(size)):
        yield torch.log_softmax(skeleton.logits(part).float(), -1).cpu()
