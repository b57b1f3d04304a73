"""Compares an engine's probabilities with those of quantkit's decode of the same checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from quantkit.errors import VERIFICATION, QuantkitError, refuse_problems
from quantkit.evaluation import metrics, windows
from quantkit.evaluation.engines import Engine
from quantkit.evaluation.metrics import Divergence, Scores
from quantkit.evaluation.scoring import Measured, batch_size, measure_floor, run, score
from quantkit.evaluation.settings import EvalSettings
from quantkit.evaluation.stream import Listener, StreamedModel
from quantkit.evaluation.windows import Windows
from quantkit.inspection import verify as verification
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.quantize.progress import Progress

TOKENS = 256  # of the sequence that `check` compares
LEAST = 1e-4  # nats per token: divergences up to here are products in 16 bit, whatever the noise
FACTOR = 4  # times the noise: other kernels round at other places (0.7 to 1.1 times were measured)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class InEngine:
    """The engine that computed a model's logits. difference: its KL divergence from quantkit's decode of the
    same model. version, kernels, dtype: as the engine says."""

    name: str
    version: str
    kernels: str | None
    dtype: str | None
    difference: Divergence


def find(asked: EvalSettings) -> Engine | None:
    """Return the requested engine, None if none is. Raises QuantkitError if its package is missing."""
    return Engine.find(asked.engine, asked.python, asked.engine_option) if asked.engine else None


def in_engine(
    engine: Engine, decoded: Measured, windows: Windows, base: Measured | None, chosen: frozenset[str],
    listen: Listener,
) -> tuple[Scores, InEngine]:  # fmt: skip
    """Return the scores of a model whose logits the engine computes. decoded: the same model as quantkit
    decodes it. Raises Declined if the engine does not load the model."""
    skeleton, count = decoded.model.skeleton, len(windows.ids)
    name = f"{decoded.model.name} in {engine.name}"
    listen(name, 0, count)
    with engine.run(skeleton.checkpoint, windows, skeleton.device) as served:

        def logits(batch: int, span: tuple[int, slice]) -> Tensor:
            listen(name, batch * batch_size(windows) + span[0], count)
            return served.logits(batch, span).to(skeleton.device)

        scores = score(logits, windows, decoded.model.chunk_tokens, base, chosen, decoded)
    listen(name, count, count)
    difference = metrics.divergence(scores.difference)
    return scores, InEngine(engine.name, served.version, served.kernels, served.dtype, difference)


def verify(
    source: str, base: str | None, asked: EvalSettings, progress: Progress, trust_remote_code: bool = False
) -> dict:
    """Verify a checkpoint with `inspection.verify`; if it is undamaged, run it in the requested engine as
    well. Return JSON."""
    engine = find(asked)
    record = verification.verify(source, base, progress.counting, trust_remote_code) | {"engine": None}
    if engine and not record["problems"]:
        paths = [source, base] if base else [source]
        opened = [open_checkpoint(path, trust_remote_code=trust_remote_code) for path in paths]
        record["engine"] = check(engine, opened, progress.evaluating)
    return record


def check(engine: Engine, checkpoints: Sequence[Checkpoint], listen: Listener) -> dict:
    """Compare an engine with quantkit's decode on one sequence of the held-out text; return JSON.

    `difference` is the mean KL divergence in nats per token, `bound` the largest that counts as rounding:
    FACTOR times the noise, and at least LEAST. The noise is the divergence of quantkit's decode from itself
    in the engine's dtype (`arithmetic`) or, if larger, of the engine from quantkit's decode of the original
    model, the second of the checkpoints (`original`). Raises Declined if the engine does not load one.
    """
    (facts, arithmetic, tokens), *others = (_difference(engine, each, listen) for each in checkpoints)
    original = others[0][0].difference.mean if others else None
    difference = facts.difference.mean
    bound = max(LEAST, FACTOR * max(arithmetic, original or 0.0))
    noise = {"tokens": tokens, "arithmetic": arithmetic, "original": original}
    agrees = difference <= bound  # NaN is none
    return asdict(facts) | noise | {"difference": difference, "bound": bound, "agrees": agrees}


def refuse(record: dict) -> None:
    """Raise QuantkitError (exit code 6), with the record, if there are problems or the engine disagrees."""
    refuse_problems(record, record["problems"], VERIFICATION)
    made = record["engine"]
    if made and not made["agrees"]:
        apart = f"KL divergence {made['difference']:.3g} nats per token from quantkit's decode"
        what = f"{made['name']} does not compute what {record['source']} holds: {apart}, "
        hint = "the file is as it was written, so the engine is wrong about it: quantkit inspect lists others"
        raise QuantkitError(f"{what}rounding explains {made['bound']:.3g}", hint, VERIFICATION, record)


def _difference(engine: Engine, checkpoint: Checkpoint, listen: Listener) -> tuple[InEngine, float, int]:
    """Return an engine's difference from quantkit's decode, the divergence of that decode from itself in the
    engine's dtype, and the number of tokens."""
    ctx = min(TOKENS, checkpoint.context or TOKENS)
    text, device, chosen = (
        windows.load(checkpoint, None, ctx, limit=ctx),
        torch.device("cpu"),
        frozenset({"kld"}),
    )
    model = StreamedModel.open(checkpoint, torch.float32, device)
    decoded = Measured(model, run(model, text, listen))
    scores, facts = in_engine(engine, decoded, text, None, chosen, listen)
    dtype = DTYPES.get(facts.dtype or "", torch.bfloat16)
    floor = measure_floor(decoded, scores, text, chosen, listen, dtype)
    return facts, floor.metrics.kld.mean, text.protocol.tokens
