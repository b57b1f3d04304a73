"""Perplexity and KL divergence of checkpoints, streamed block by block: no model is ever held whole.

All evaluation tokens advance through a model one block at a time, so memory does not grow with depth.
The base model's final hidden states are kept (hidden-size, not vocabulary-size); logits of base and
candidate are formed chunk by chunk from them, so the KL divergence is exact and no logit file exists.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration import begins_with_bos
from quantkit.checkpoint import Checkpoint
from quantkit.errors import NOT_FOUND, UNSUPPORTED, USAGE, QuantkitError
from quantkit.heap import map_large_blocks
from quantkit.plan import BATCH_TOKENS
from quantkit.skeleton import Skeleton, check_complete
from quantkit.trial import Trial

SCHEMA = "quantkit.eval/1"
DEFAULT_CONTEXT = 2048
CHUNK_BYTES = 1 << 26  # float32 logits held at a time, per model


@dataclass(frozen=True)
class Protocol:
    """Everything a perplexity depends on besides the model. Unlike protocols never share a table.

    Windows are `ctx` tokens, `stride` apart; only tokens no earlier window predicted are scored, each
    given the window's tokens before it. bos: every window begins with the tokenizer's BOS, in place
    of a text token. tokens: how many tokens were predicted and scored.
    """

    text: str
    sha256: str
    tokens: int
    ctx: int
    stride: int
    bos: bool
    tokenizer: str


@dataclass(frozen=True)
class Windows:
    """ids: int64 `[windows, ctx]`. first: index of the first scored target in each window, `[windows]`."""

    ids: Tensor
    first: list[int]
    protocol: Protocol


def load_windows(
    checkpoint: Checkpoint, text: Path, ctx: int | None, stride: int | None, limit: int | None
) -> Windows:
    """Cut a text into windows. `limit`: use its first N tokens only.

    Raises QuantkitError when the text is missing or shorter than one window, or ctx exceeds the
    model's context.
    """
    content = _read(text)
    tokenizer = checkpoint.tokenizer
    context = checkpoint.context
    ctx = min(DEFAULT_CONTEXT, context or DEFAULT_CONTEXT) if ctx is None else ctx
    stride = ctx if stride is None else stride
    _check_context(checkpoint, ctx)
    if not 2 <= ctx or not 1 <= stride <= ctx:
        raise QuantkitError(f"--ctx {ctx} --stride {stride} make no windows", "1 ≤ stride ≤ ctx", USAGE)
    if limit is not None and limit < 1:
        raise QuantkitError(f"--limit {limit} leaves no token", "choose 1 or more", USAGE)
    bos = begins_with_bos(tokenizer)
    stream = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"][:limit]
    body, step = ctx - bos, min(stride, ctx - bos)
    starts = list(range(0, len(stream) - body + 1, step))
    if not starts:
        raise QuantkitError(
            f"{text} holds {len(stream)} tokens; one window needs {body}",
            hint="give a longer --text, a larger --limit or a shorter --ctx",
            exit_code=USAGE,
        )
    ids = torch.tensor([stream[start : start + body] for start in starts])
    if bos:
        ids = torch.cat([torch.full((len(ids), 1), tokenizer.bos_token_id), ids], 1)
    overlap = ctx - step - bos  # text tokens a window shares with the one before
    first = [0] + [max(0, overlap + bos - 1)] * (len(starts) - 1) if overlap > 0 else [0] * len(starts)
    scored = sum(ctx - 1 - start for start in first)
    if scored < 2:
        raise QuantkitError(
            f"1 token of {text} would be scored, which has no standard error",
            hint="give a longer --text, a larger --limit or a longer --ctx",
            exit_code=USAGE,
        )
    protocol = Protocol(
        text=text.name,
        sha256=hashlib.sha256(content.encode()).hexdigest(),
        tokens=scored,
        ctx=ctx,
        stride=stride,
        bos=bos,
        tokenizer=tokenizer_sha256(tokenizer),
    )
    return Windows(ids, first, protocol)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise QuantkitError(
            f"text {path} cannot be read: {error.strerror}", "check the path given to --text", NOT_FOUND
        ) from error
    except UnicodeDecodeError as error:
        raise QuantkitError(f"{path} is not UTF-8 text: {error}", "convert it", USAGE) from error


def tokenizer_sha256(tokenizer) -> str:
    """Hash of the vocabulary and of how texts are cut: equal means comparable perplexities."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    sample = tokenizer("Hello  World's 1234\n\tnaïve 안녕", add_special_tokens=False)["input_ids"]
    rules: list = []
    if tokenizer.is_fast:  # the others do not tell their merges: the sample has to do
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        rules = [backend[part] for part in ("normalizer", "pre_tokenizer", "model")]
    return hashlib.sha256(repr((vocabulary, sample, rules)).encode()).hexdigest()


def _check_context(checkpoint: Checkpoint, ctx: int) -> None:
    """Raise QuantkitError if windows are longer than what the model was made for."""
    context = checkpoint.context
    if context is not None and ctx > context:
        raise QuantkitError(
            f"--ctx {ctx} is longer than the context {context} of {checkpoint.source}",
            hint=f"use --ctx {context}",
            exit_code=USAGE,
        )


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
        _check_context(checkpoint, windows.protocol.ctx)
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
    first = checkpoints[0]
    for other in checkpoints[1:]:
        if tokenizer_sha256(other.tokenizer) != tokenizer_sha256(first.tokenizer):
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
    disk_bytes = sum(path.stat().st_size for path in checkpoint.folder.iterdir() if path.is_file())
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
