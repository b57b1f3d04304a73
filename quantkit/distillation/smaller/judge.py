"""Teacher, student as cut and student as trained, measured by the same text: which of the two is
published."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from quantkit.evaluation.comparison.record import record
from quantkit.evaluation.evaluate import evaluate
from quantkit.evaluation.stream import Listener
from quantkit.evaluation.windows import Protocol, Windows
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.tokenizer_hash import tokenizer_sha256
from quantkit.text.calibration import CalibrationSet

CHOSEN = frozenset({"ppl", "dppl", "kld", "top1"})
SHARE = 8  # one sequence of so many is held out of training
MOST = 32  # sequences held out


def split(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences to train on, and those held out: from all over the text, so that they are of its kinds."""
    held = torch.zeros(len(tokens), dtype=torch.bool)
    held[:: max(SHARE, -(-len(tokens) // MOST))] = True
    return tokens[~held], tokens[held]


def windows(held_out: Tensor, checkpoint: Checkpoint, calibrated: CalibrationSet) -> Windows:
    """The sequences that are held out, `[windows, ctx]`, as `eval` takes them."""
    count, ctx = held_out.shape
    protocol = Protocol(
        text=f"held out of {Path(calibrated.provenance.source).name} text",
        sha256=hashlib.sha256(held_out.numpy().astype("<i8").tobytes()).hexdigest(),
        tokens=count * (ctx - 1),
        ctx=ctx,
        stride=ctx,
        bos=calibrated.provenance.bos,
        tokenizer=tokenizer_sha256(checkpoint.tokenizer, checkpoint.text_config.vocab_size),
    )
    return Windows(held_out, [0] * count, protocol)


def measure(
    checkpoints: Sequence[Checkpoint], text: Windows, device: torch.device, listen: Listener
) -> tuple[list[float], dict]:
    """Mean KL divergence from the first model, of each of the others, and the record of all metrics;
    float32."""
    found = evaluate(checkpoints, text, torch.float32, device, listen, chosen=CHOSEN)
    divergences = [result.metrics.kld.mean for result in found.results[1:]]
    return divergences, record(text.protocol, torch.float32, device, found, CHOSEN)
