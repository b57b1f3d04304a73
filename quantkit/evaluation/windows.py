"""Cuts a text into windows of tokens, and records the protocol on which perplexities depend."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.errors import USAGE, count, require
from quantkit.models.files import tokenizing
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.gguf.tokenizer_hash import tokenizer_sha256
from quantkit.models.machine import distributed
from quantkit.options import CalibrationOptions, check_value
from quantkit.text import sources
from quantkit.text.calibration import Provenance, begins_with_bos
from quantkit.text.chat import ChatTemplate

DEFAULT_CONTEXT = 2048
NOTED = 0.05  # share of a text that may remain unmeasured without a warning


@dataclass(frozen=True)
class Protocol:
    """The conditions of a perplexity besides the model. Figures of different protocols never share a table.

    text: name of the text. Windows have `ctx` tokens and start `stride` tokens apart. A token is scored once,
    in the first window that predicts it. bos: whether every window begins with the tokenizer's BOS in place
    of a text token. tokens: number of scored tokens. tokenizer: hash of the tokenizer.
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
    """Windows of a text. ids: int64 `[windows, ctx]`. first: for each window, the first position whose
    prediction is scored. left: number of tokens at the end of the text that fill no window."""

    ids: Tensor
    first: list[int]
    protocol: Protocol
    left: int = 0

    @property
    def note(self) -> str | None:
        """Return a warning if much of the text is not measured, else None."""
        used = self.protocol.tokens + self.left
        if self.left < NOTED * used:
            return None
        tokens, text = count(self.left, "token"), self.protocol.text
        return f"{tokens} of {text} after the last whole window of {self.protocol.ctx} are not measured"

    def shared(self, batch: int) -> Windows:
        """Return the windows of this rank, in whole batches of `batch` windows.

        Raises QuantkitError if there are fewer batches than ranks.
        """
        starts = distributed.share(range(0, len(self.ids), batch))
        windows, ranks = f"{count(len(self.ids), 'window')} in batches of {batch}", distributed.count()
        what = f"{windows} are fewer batches than the {ranks} processes"
        enough = -(-len(self.ids) // batch) >= ranks
        require(enough, what, "start fewer processes, or give a longer --text", USAGE)
        span = slice(starts[0], starts[-1] + batch)
        return replace(self, ids=self.ids[span], first=self.first[span])


def load(
    checkpoint: Checkpoint, text: Path | str | None, ctx: int | None = None, stride: int | None = None,
    limit: int | None = None, offline: bool = False, column: str = CalibrationOptions.text_column,
) -> Windows:  # fmt: skip
    """Cut a text into windows. text: a file, a dataset of the hub, or None for the shipped held-out text.
    limit: use only the first `limit` tokens. column: name of the text column, for a file or dataset with
    columns.

    Raises QuantkitError if the text is missing or shorter than one window, or if `ctx` exceeds the
    model's context.
    """
    tokenizer = checkpoint.tokenizer
    name, content = sources.held_out(text, ChatTemplate(tokenizer).render, column, offline)
    context = checkpoint.context
    ctx = min(DEFAULT_CONTEXT, context or DEFAULT_CONTEXT) if ctx is None else ctx
    stride = ctx if stride is None else stride
    check_context(checkpoint, ctx)
    for flag, value, least, most in (
        ("--ctx", ctx, 2, ctx), ("--stride", stride, 1, ctx), ("--limit", limit, 1, limit)
    ):  # fmt: skip
        hint = f"choose {least} or more" + (f", up to {ctx}" if flag == "--stride" else "")
        check_value(flag, value, value is None or least <= value <= most, hint)
    bos = begins_with_bos(tokenizer)
    stream = tokenizing.encode(tokenizer, content, limit)
    body, step = ctx - bos, min(stride, ctx - bos)
    starts = list(range(0, len(stream) - body + 1, step))
    what, hint = f"{name} holds {count(len(stream), 'token')}", "give a longer --text or a shorter --ctx"
    if len(stream) == limit:
        what, hint = f"--limit leaves {count(limit, 'token')}", "give a larger --limit or a shorter --ctx"
    require(starts, f"{what}; one window needs {body}", hint, USAGE)
    ids = torch.tensor([stream[start : start + body] for start in starts])
    if bos:
        ids = torch.cat([torch.full((len(ids), 1), tokenizer.bos_token_id), ids], 1)
    checkpoint.check_ids(ids.unique().tolist())
    overlap = ctx - step - bos  # text tokens that a window shares with the previous window
    first = [0] + [max(0, overlap + bos - 1)] * (len(starts) - 1)
    left = len(stream) - (starts[-1] + body)
    return _windows(checkpoint, ids, first, name, content.encode(), stride, bos, left)


def held_out(checkpoint: Checkpoint, tokens: Tensor, provenance: Provenance) -> Windows:
    """Return held-out calibration sequences as windows. tokens: int64 `[windows, ctx]`."""
    name = f"{Path(provenance.source).name} calibration text, held out"
    content, (count, ctx) = tokens.numpy().astype("<i8").tobytes(), tokens.shape
    return _windows(checkpoint, tokens, [0] * count, name, content, ctx, provenance.bos)


def _windows(
    checkpoint: Checkpoint, ids: Tensor, first: list[int], name: str, content: bytes, stride: int, bos: bool,
    left: int = 0,
) -> Windows:  # fmt: skip
    """Return windows with their protocol. content: of the text `name`, to hash."""
    ctx, tokenizer = ids.shape[1], tokenizer_sha256(checkpoint.tokenizer, checkpoint.text_config.vocab_size)
    scored = sum(ctx - 1 - start for start in first)
    digest = hashlib.sha256(content).hexdigest()
    return Windows(ids, first, Protocol(name, digest, scored, ctx, stride, bos, tokenizer), left)


def check_context(checkpoint: Checkpoint, ctx: int) -> None:
    """Raise QuantkitError if windows of `ctx` tokens are longer than the model's context."""
    context = checkpoint.context
    what = f"--ctx {ctx} is longer than the context {context} of {checkpoint.source}"
    require(context is None or ctx <= context, what, f"use --ctx {context}", USAGE)
