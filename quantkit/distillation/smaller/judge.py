"""Teacher, student as cut and student as trained, measured by the same text: which of the two is
published."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.evaluation.comparison.record import record
from quantkit.evaluation.evaluate import evaluate
from quantkit.evaluation.stream import Listener
from quantkit.evaluation.windows import Windows
from quantkit.models.files.checkpoint import Checkpoint

CHOSEN = frozenset({"ppl", "dppl", "kld", "top1"})


def measure(
    checkpoints: Sequence[Checkpoint], text: Windows, device: torch.device, listen: Listener
) -> tuple[list[float], dict]:
    """Mean KL divergence from the first model, of each of the others, and the record of all metrics;
    float32."""
    found = evaluate(checkpoints, text, torch.float32, device, listen, chosen=CHOSEN)
    divergences = [result.metrics.kld.mean for result in found.results[1:]]
    return divergences, record(text.protocol, torch.float32, device, found, CHOSEN)
