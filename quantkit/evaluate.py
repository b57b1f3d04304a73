"""Perplexity and KL divergence of checkpoints, streamed block by block: no model is ever held whole.

All evaluation tokens advance through a model one block at a time, so memory does not grow with depth.
The base model's final hidden states are kept (hidden-size, not vocabulary-size); logits of base and
candidate are formed chunk by chunk from them, so the KL divergence is exact and no logit file exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.heap import map_large_blocks
from quantkit.plan import BATCH_TOKENS
from quantkit.skeleton import Skeleton, check_complete
from quantkit.tokenizer_hash import tokenizer_sha256
from quantkit.trial import Trial
from quantkit.windows import Windows, check_context

SCHEMA = "quantkit.eval/1"
CHUNK_BYTES = 1 << 26  # float32 logits held at a time, per model


@dataclass(frozen=True)
class Metrics:
    """Means over scored tokens, in nats. Standard errors treat tokens as independent."""

    nll: float
    nll_stderr: float
    kld: float | None

    def record(self) -> dict:
        """The JSON of one model; perplexity's standard error follows from nll's by the delta method."""
        ppl = math.exp(self.nll)
        return {
            "nll": {"value": self.nll, "stderr": self.nll_stderr},
            "ppl": {"value": ppl, "stderr": ppl * self.nll_stderr},
            "kld": {"mean": self.kld},
        }


@dataclass(frozen=True)
class Result:
    """One model of a comparison. weight_bytes: its tensors; disk_bytes: all files of its folder."""

    source: str
    disk_bytes: int
    weight_bytes: int
    bits_per_weight: float
    metrics: Metrics


Listener = Callable[[str, int, int], None]  # model, blocks done, blocks in all


def evaluate(
    checkpoints: Sequence[Checkpoint], windows: Windows, dtype: torch.dtype, device: torch.device,
    listen: Listener = lambda source, done, total: None, trials: Sequence[str] = (),
) -> list[Result]:  # fmt: skip
    """Perplexity of every checkpoint and its KL divergence to the first; then that of the first as
    data-free methods (`trials`) would leave it.

    Raises QuantkitError when a candidate's tokenizer or vocabulary differs from the first's.
    """
    check_comparable(checkpoints)
    for checkpoint in checkpoints:
        check_context(checkpoint, windows.protocol.ctx)
    map_large_blocks()
    candidates: list[tuple[Checkpoint, Trial | None]] = [(checkpoint, None) for checkpoint in checkpoints]
    candidates += [(checkpoints[0], Trial.prepare(name, checkpoints[0])) for name in trials]
    results, base = [], None
    for checkpoint, trial in candidates:
        skeleton = Skeleton(checkpoint, dtype, device)
        check_complete(skeleton)
        skeleton.load_rest()
        states = _stream(skeleton, windows.ids, listen, trial)
        metrics = _measure(skeleton, states, windows, base)
        results.append(_result(checkpoint, skeleton, metrics, trial))
        base = base or (skeleton, states)
    return results


def check_comparable(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise QuantkitError unless all checkpoints read a text as the same tokens and predict the same ones."""
    first, *others = checkpoints
    tokenizers = [tokenizer_sha256(c.tokenizer, c.config.vocab_size) for c in checkpoints] if others else []
    for other, tokenizer in zip(others, tokenizers[1:], strict=True):
        if tokenizer != tokenizers[0]:
            raise QuantkitError(
                f"{other.source} and {first.source} have different tokenizers",
                hint="perplexities over different tokens cannot be compared: evaluate them one by one",
                exit_code=UNSUPPORTED,
            )
        sizes = first.config.vocab_size, other.config.vocab_size
        if sizes[0] != sizes[1]:
            raise QuantkitError(
                f"{first.source} predicts {sizes[0]} tokens, {other.source} {sizes[1]}",
                hint="a divergence over different vocabularies is not defined: evaluate them one by one",
                exit_code=UNSUPPORTED,
            )


def _stream(skeleton: Skeleton, ids: Tensor, listen: Listener, trial: Trial | None) -> list[Tensor]:
    """Final hidden states, a batch of windows at a time, `[batch, ctx, hidden]`."""
    source = _named(skeleton.checkpoint, trial)
    batch = max(1, BATCH_TOKENS // ids.shape[1])
    states = [skeleton.embed(part) for part in ids.split(batch)]
    count = len(skeleton.blocks)
    for index in range(count):
        skeleton.load_block(index)
        if trial:
            trial.apply(skeleton, index)
        for k, hidden in enumerate(states):
            states[k] = skeleton.run_block(index, hidden)
        skeleton.free_block(index)
        listen(source, index + 1, count)
    return states


def _measure(
    skeleton: Skeleton, states: list[Tensor], windows: Windows, base: tuple[Skeleton, list[Tensor]] | None
) -> Metrics:
    """Negative log likelihood of every scored token, and KL divergence to the base, chunk by chunk."""
    losses, divergence = [], 0.0
    for chunk in _chunks(states, windows, skeleton.model.config.vocab_size):
        log_probs = _log_probs(skeleton, chunk.pick(states))
        targets = chunk.targets.to(log_probs.device)
        losses.append(-log_probs.gather(1, targets[:, None])[:, 0].double().cpu())
        if base:
            expected = _log_probs(base[0], chunk.pick(base[1]))
            divergence += torch.sum(expected.exp() * (expected - log_probs), dtype=torch.float64).item()
    nll = torch.cat(losses)
    stderr = (nll.std() / math.sqrt(len(nll))).item()
    return Metrics(nll.mean().item(), stderr, divergence / len(nll) if base else None)


@dataclass(frozen=True)
class _Chunk:
    """Scored positions `start:end` of one window: hidden states there predict `targets`."""

    batch: int
    row: int
    start: int
    end: int
    targets: Tensor

    def pick(self, states: list[Tensor]) -> Tensor:
        return states[self.batch][self.row, self.start : self.end]


def _chunks(states: list[Tensor], windows: Windows, vocab_size: int) -> Iterator[_Chunk]:
    size = max(1, CHUNK_BYTES // (4 * vocab_size))
    window = 0
    for batch, hidden in enumerate(states):
        for row in range(len(hidden)):
            ids, last = windows.ids[window], windows.ids.shape[1] - 1
            for start in range(windows.first[window], last, size):
                end = min(start + size, last)
                yield _Chunk(batch, row, start, end, ids[start + 1 : end + 1])
            window += 1


def _log_probs(skeleton: Skeleton, hidden: Tensor) -> Tensor:
    """float32 `[tokens, vocabulary]`."""
    return torch.log_softmax(skeleton.logits(hidden).float(), -1)


def _named(checkpoint: Checkpoint, trial: Trial | None) -> str:
    return f"{checkpoint.source} as {trial.method.name}" if trial else checkpoint.source


def _result(checkpoint: Checkpoint, skeleton: Skeleton, metrics: Metrics, trial: Trial | None) -> Result:
    weight_bytes = sum(info.nbytes for info in checkpoint.infos.values())
    disk_bytes = checkpoint.disk_bytes
    if trial:  # what would be written
        disk_bytes += trial.weight_bytes(checkpoint) - weight_bytes
        weight_bytes = trial.weight_bytes(checkpoint)
    parameters = {id(p): p.numel() for p in skeleton.model.parameters()}
    count = sum(parameters.values()) + sum(p.numel() for b in skeleton.blocks for p in b.parameters())
    return Result(
        source=_named(checkpoint, trial),
        disk_bytes=disk_bytes,
        weight_bytes=weight_bytes,
        bits_per_weight=8 * weight_bytes / count,
        metrics=metrics,
    )


def record(windows: Windows, dtype: torch.dtype, results: Sequence[Result]) -> dict:
    """The versioned JSON of a comparison."""
    return {
        "schema": SCHEMA,
        "data": asdict(windows.protocol) | {"dtype": str(dtype).removeprefix("torch.")},
        "models": [
            {
                "source": result.source,
                "size": {
                    "disk_bytes": result.disk_bytes,
                    "weight_bytes": result.weight_bytes,
                    "bits_per_weight": result.bits_per_weight,
                },
                "metrics": result.metrics.record(),
            }
            for result in results
        ],
    }
