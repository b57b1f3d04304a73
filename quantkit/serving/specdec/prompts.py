"""Prompts: pieces of a text, as token ids of the target."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.errors import USAGE, QuantkitError, count
from quantkit.evaluation.windows import read_text
from quantkit.models.files import tokenizing
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.options import CalibrationOptions
from quantkit.text import calibration


@dataclass(frozen=True)
class Prompts:
    """ids: int64 `[prompts, tokens]`. source: the text's name; sha256: of the ids."""

    ids: Tensor
    source: str
    sha256: str


def load(checkpoint: Checkpoint, text: Path | None, prompts: int, tokens: int, seed: int) -> Prompts:
    """So many prompts of so many tokens: spread evenly over a text, or of the shipped calibration text.

    Raises QuantkitError when the text cannot be read or is too short.
    """
    if text is None:
        options = CalibrationOptions(samples=prompts, seqlen=tokens, seed=seed)
        ids, source = calibration.load(checkpoint, options).tokens, "shipped"
    else:
        ids, source = _cut(checkpoint, text, prompts, tokens), text.name
    return Prompts(ids, source, hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest())


def _cut(checkpoint: Checkpoint, text: Path, prompts: int, tokens: int) -> Tensor:
    tokenizer = checkpoint.tokenizer
    bos = calibration.begins_with_bos(tokenizer)
    stream, body = tokenizing.encode(tokenizer, read_text(text)), tokens - bos
    if len(stream) < prompts * body:
        raise QuantkitError(
            f"{text} holds {count(len(stream), 'token')}; {count(prompts, 'prompt')} of {tokens} need "
            f"{prompts * body:,}",
            "give a longer --text, fewer --prompts or a smaller --prompt-tokens",
            USAGE,
        )
    apart = (len(stream) - body) // max(1, prompts - 1)
    ids = torch.tensor([stream[place * apart : place * apart + body] for place in range(prompts)])
    return torch.cat([torch.full((prompts, 1), tokenizer.bos_token_id), ids], 1) if bos else ids
