"""Text sampled from a model, to calibrate or train on.

Such text resembles the training data, and no dataset is needed. Sequences are sampled from the plain
distribution (temperature 1, no cut-off), many at once, because each step reads all weights. A sequence begins
with the token that begins or separates texts, and continues after the end of a text (LLM-QAT, Liu et al.
2023, arXiv:2305.17888, section 3.1; for calibration, Williams et al. 2024, arXiv:2410.17170).
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers
from torch import Tensor

from quantkit.errors import RESOURCES, USAGE, QuantkitError, require
from quantkit.evaluation.sampling import beginning, generation_config, load_model
from quantkit.evaluation.settings import SampleSettings, Sampling
from quantkit.models.files import atomic
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.quantize.staging.may_replace import check_place

SCHEMA = "quantkit.sample/1"
# One spare sequence per 16, and one more: a text may have fewer tokens when it is tokenized again, and jobs
# measure their loss on tokens after the calibration sequences.
SPARE = 16


def sequences(
    checkpoint: Checkpoint,
    settings: SampleSettings,
    dtype: torch.dtype,
    device: torch.device,
    listen: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Tensor]:
    """Yield batches of token ids, int64 `[batch, seqlen]` on the CPU; equal settings give equal ids.

    Raises QuantkitError if the whole model does not fit the memory (exit code 5), or if it has no token to
    begin with.
    """
    first = beginning(checkpoint, "give text with --calibration instead")
    samples = settings.samples
    model = load_model(checkpoint, dtype, device, min(settings.batch_size, samples) * settings.seqlen)
    how = generation_config(Sampling(settings.seqlen - 1, temperature=1.0), [])
    how.update(min_new_tokens=settings.seqlen - 1, pad_token_id=first)
    model.generation_config = transformers.GenerationConfig()  # ignore the checkpoint's own settings
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(settings.seed % 2**64)
        for start in range(0, samples, settings.batch_size):
            listen(start, samples)
            prompt = torch.full((min(settings.batch_size, samples - start), 1), first, device=device)
            with torch.no_grad():
                out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=how)
            yield out.cpu()
    listen(samples, samples)


def write(
    checkpoint: Checkpoint,
    settings: SampleSettings,
    output: Path,
    dtype: torch.dtype,
    device: torch.device,
    listen: Callable[[int, int], None] = lambda done, total: None,
) -> dict:
    """Write a file of JSON lines, `{"text": ...}`, for `--calibration`; return its JSON record.
    The file appears whole or not at all."""
    settings.check(checkpoint.source, checkpoint.context)
    tokens = texts = 0
    more = replace(settings, samples=settings.samples + settings.samples // SPARE + 1)
    try:
        with atomic.replacing(output) as temporary, open(temporary, "w", encoding="utf-8") as file:
            for batch in sequences(checkpoint, more, dtype, device, listen):
                for ids in batch[:, 1:].tolist():
                    text = checkpoint.tokenizer.decode(ids, skip_special_tokens=True)
                    file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                tokens, texts = tokens + batch.numel(), texts + len(batch)
    except OSError as error:
        what = f"{output} cannot be written: {error.strerror}"
        raise QuantkitError(what, "choose another file with -o", RESOURCES) from error
    return {
        "schema": SCHEMA,
        "source": checkpoint.source,
        "output": str(output),
        "settings": asdict(settings) | {"dtype": str(dtype).removeprefix("torch."), "device": str(device)},
        "texts": texts,
        "tokens": tokens,
    }


def check_output(output: Path, overwrite: bool) -> None:
    """Raise QuantkitError if `output` cannot be written. An existing file is replaced only with `overwrite`,
    and only if `quantkit sample` wrote it."""
    folder = output.parent
    require(folder.is_dir(), f"no such folder: {folder}", "make it, or choose another -o", USAGE)
    check_place(output)
    if not os.path.lexists(output):
        lines = f"{output}: sample writes JSON lines"
        return require(output.suffix == ".jsonl", lines, "choose a name that ends in .jsonl", USAGE)
    plain = output.is_file() and not output.is_symlink()
    require(plain, f"{output} is not a plain file", "choose another -o, such as own.jsonl", USAGE)
    require(overwrite, f"{output} exists", "choose another -o, or replace it with --overwrite", USAGE)
    with open(output, "rb") as file:
        written = file.read(9) in (b'{"text": ', b"")
    require(written, f"{output} was not written by quantkit sample", "choose another -o", USAGE)
