"""Text that a model writes by itself, to calibrate it on: in its own language and of its own kind.

Sampled from the bare distribution, from the token that begins texts, it is what the model takes text to be;
no corpus is needed that resembles what it was trained on (LLM-QAT, Liu et al. 2023, arXiv:2305.17888, section
2; Williams et al. 2024, arXiv:2410.17170). Many texts are written at once, as each token reads all weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from quantkit.errors import RESOURCES, USAGE, QuantkitError
from quantkit.evaluation.sampling import Sampling, ends_of_text, generation_config
from quantkit.evaluation.whole_model import load_model
from quantkit.models.checkpoint import Checkpoint
from quantkit.quantize.progress import Progress

SCHEMA = "quantkit.sample/1"
SHORTEST = 8  # tokens of a text that is kept
FRUITLESS = 16  # rounds of texts that all end at once before it is given up


@dataclass(frozen=True)
class Settings:
    """samples: sequences of seqlen tokens are to be filled, by more texts where some end sooner. batch_size:
    texts written at once."""

    samples: int = 128
    seqlen: int = 512
    seed: int = 0
    temperature: float = 1.0
    batch_size: int = 32

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise QuantkitError for what cannot be written."""
        for name in ("samples", "seqlen", "batch_size"):
            if getattr(self, name) < (2 if name == "seqlen" else 1):
                flag = f"--{name.replace('_', '-')}"
                raise QuantkitError(f"{flag} {getattr(self, name)} makes no sense", "choose more", USAGE)
        if not 0 < self.temperature < float("inf"):
            raise QuantkitError(
                f"--temperature {self.temperature:g} would write the same text again and again",
                "leave it out: 1 is the model's own distribution",
                USAGE,
            )
        if checkpoint.context is not None and self.seqlen > checkpoint.context:
            raise QuantkitError(
                f"{checkpoint.source} was made for {checkpoint.context} tokens, not --seqlen {self.seqlen}",
                f"choose at most --seqlen {checkpoint.context}",
                USAGE,
            )


def write(
    checkpoint: Checkpoint,
    settings: Settings,
    output: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> dict:
    """Write texts as JSON lines, `{"text": ...}`, and tell what was written. The file appears whole or not
    at all; the same seed, model, batch size and machine write the same.

    Raises QuantkitError (exit code 5) where the model does not fit the memory, or the disk is full.
    """
    settings.check(checkpoint)
    progress.phase(f"loading {checkpoint.source}")
    model = load_model(checkpoint, dtype, device, settings.batch_size * settings.seqlen)
    part = output.with_name(f"{output.name}.partial")
    wanted, tokens, rows = settings.samples * settings.seqlen, 0, 0
    try:
        with open(part, "w", encoding="utf-8") as file:
            for ids in _texts(checkpoint, model, settings):
                progress.counting("writing texts", min(tokens, wanted), wanted)
                text = checkpoint.tokenizer.decode(ids, skip_special_tokens=True)
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                tokens, rows = tokens + len(ids), rows + 1
                if tokens >= wanted:
                    break
        os.replace(part, output)
    except OSError as error:
        raise QuantkitError(
            f"{output} cannot be written: {error.strerror}", "give another place with -o", RESOURCES
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return {
        "schema": SCHEMA,
        "source": checkpoint.source,
        "output": str(output),
        "settings": asdict(settings) | {"dtype": str(dtype).removeprefix("torch."), "device": str(device)},
        "texts": rows,
        "tokens": tokens,
    }


def check_output(output: Path, overwrite: bool) -> None:
    """Raise QuantkitError unless texts may be written there: over nothing but lines of JSON, and those only
    where the user allows it."""
    if not output.parent.is_dir():
        raise QuantkitError(f"no such folder: {output.parent}", "make it, or choose another -o", USAGE)
    if not os.path.lexists(output):
        return
    if output.is_symlink() or not output.is_file():
        raise QuantkitError(f"{output} is no plain file", "choose another -o", USAGE)
    if not overwrite:
        raise QuantkitError(f"{output} exists", "choose another -o, or replace it with --overwrite", USAGE)
    with open(output, "rb") as file:
        first = file.read(9)
    if first not in (b'{"text": ', b""):
        raise QuantkitError(f"{output} holds no texts that were written here", "choose another -o", USAGE)


def _texts(checkpoint: Checkpoint, model: nn.Module, settings: Settings) -> Iterator[list[int]]:
    """Ids of one text after another, without the token they began with and that which ended them."""
    ends = ends_of_text(checkpoint)
    config = generation_config(Sampling(settings.seqlen, settings.temperature), ends)
    device, fruitless, place = next(model.parameters()).device, 0, 0
    devices = [device] if device.type == "cuda" else []
    while fruitless < FRUITLESS:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(settings.seed * 1_000_003 + place)
            first = _beginnings(checkpoint, settings.batch_size, ends).to(device)
            out = model.generate(first, attention_mask=torch.ones_like(first), generation_config=config)
        found = [_ended(row, ends) for row in out[:, 1:].tolist()]
        kept = [ids for ids in found if len(ids) >= SHORTEST]
        fruitless, place = (0 if kept else fruitless + 1), place + 1
        yield from kept
    raise QuantkitError(
        f"{checkpoint.source} ends its texts before they have begun",
        "give it text with --calibration instead: it writes none by itself",
        RESOURCES,
    )


def _ended(ids: list[int], ends: list[int]) -> list[int]:
    """Up to the first token that ends a text."""
    return ids[: next((place for place, token in enumerate(ids) if token in ends), len(ids))]


def _beginnings(checkpoint: Checkpoint, count: int, ends: list[int]) -> Tensor:
    """The token that texts begin with, `[count, 1]`: what the tokenizer or the configuration names, else one
    that ends texts, as between two in training; else any that is not special."""
    tokenizer = checkpoint.tokenizer
    named = (tokenizer.bos_token_id, getattr(checkpoint.text_config, "bos_token_id", None), *ends[:1])
    begin = next((token for token in named if token is not None), None)
    if begin is not None:
        return torch.full((count, 1), begin)
    special = set(tokenizer.all_special_ids)
    plain = torch.tensor([token for token in range(len(tokenizer)) if token not in special])
    return plain[torch.randint(len(plain), (count, 1))]
