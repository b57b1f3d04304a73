"""A target with one draft after the other: opened, checked, loaded, measured."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, USAGE, VERIFICATION, QuantkitError, count
from quantkit.evaluation.generate import shared_dtype
from quantkit.evaluation.windows import read_text
from quantkit.models.files import tokenizing
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.tokenizer_hash import difference, tokenizer_sha256
from quantkit.models.machine.device import choose_device
from quantkit.models.machine.memory import return_freed_pages
from quantkit.options import CalibrationOptions
from quantkit.quantize.progress import Progress
from quantkit.serving.engines.choose import choose_local
from quantkit.serving.specdec.measure import Engine, measure
from quantkit.serving.specdec.settings import LOOKUP, Settings
from quantkit.text import calibration

SCHEMA = "quantkit.specdec/1"


def refuse_unlike(record: dict[str, Any]) -> None:
    """Raise QuantkitError (exit code 6) where a draft changed the text by more than rounding explains."""
    unlike = [row["draft"] for row in record["drafts"] if row["proof"] and not row["proof"]["alike"]]
    if unlike:
        raise QuantkitError(
            f"text drafted by {', '.join(unlike)} is not the target's own",
            "the rule that accepts tokens is at fault, or a kernel: do not use this pair; a test "
            "of sampled text errs once in a thousand runs: see what another --seed says",
            VERIFICATION,
            record,
        )


def compare(
    target: Checkpoint, drafts: Sequence[Checkpoint | None], settings: Settings, progress: Progress
) -> dict[str, Any]:
    """Measure every draft (None: prompt-lookup) beside the target alone, each in one run with it.

    Returns the versioned record; its drafts are those of `measure`, prompts_sha256 is that of the prompts'
    token ids, int64 little-endian. Raises QuantkitError where tokens differ or a context is too short, before
    anything is loaded; where memory does not suffice; and where an engine cannot do it.
    """
    device = choose_device(settings.device)
    dtype = shared_dtype(settings.dtype, target, device)
    models = [target, *(draft for draft in drafts if draft is not None)]
    name, _ = choose_local(settings.engine, [made.source for made in models if not made.folder.is_file()])
    _check(models, settings)
    ids, text = _prompts(target, settings)
    progress.phase(f"loading {target.source}")
    if name == "llama.cpp":
        from quantkit.serving.specdec.llamacpp import Speculation

        engine: Engine = Speculation(target, ids, settings, device)
    else:
        from quantkit.serving.specdec.transformers import Assisted

        engine = Assisted(target, ids, settings, device, dtype)
    measured = []
    for draft in drafts:
        called = draft.source if draft else LOOKUP
        progress.phase(f"loading {called}")
        try:
            sizes = engine.load(draft)
            counting = partial(progress.counting, f"drafting by {called}")
            measured.append(measure(draft, engine, settings, sizes, counting))
        finally:
            engine.close()
        gc.collect()
        return_freed_pages()
    told = asdict(settings) | {"ks": settings.ks, "text": text, "dtype": engine.precision}
    told |= {"prompts_sha256": hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()}
    told |= {"device": str(device), "threads": torch.get_num_threads()}
    del told["k"], told["engine"]
    return {"schema": SCHEMA, "target": target.source, "settings": told, "drafts": measured}


def _check(models: Sequence[Checkpoint], settings: Settings) -> None:
    """Raise QuantkitError where prompt and new tokens are more than a model was made for (exit code 2), and
    where a draft's tokens are not the target's (4).

    Logits must be as wide as well: the rule that accepts compares the two distributions number by number.
    """
    needed = settings.prompt_tokens + settings.tokens
    for model in models:
        if model.context is not None and needed > model.context:
            raise QuantkitError(
                f"{model.source} was made for {model.context} tokens; prompt and new tokens make {needed}",
                f"choose --prompt-tokens and --tokens of at most {model.context} together",
                USAGE,
            )
    target, *drafts = models
    size = target.text_config.vocab_size
    own = tokenizer_sha256(target.tokenizer, size)
    for draft in drafts:
        other, why = draft.text_config.vocab_size, ""
        if tokenizer_sha256(draft.tokenizer, other) != own:
            why = difference(target.tokenizer, draft.tokenizer, (size, other))
        elif size != other:
            why = f"its embedding has {other} rows instead of {size}, though the tokens are the same"
        if why:
            raise QuantkitError(
                f"{draft.source} cannot draft for {target.source}: {why}",
                "choose a smaller model of its family, a compressed copy of it, or prompt-lookup",
                UNSUPPORTED,
            )


def _prompts(checkpoint: Checkpoint, settings: Settings) -> tuple[Tensor, str]:
    """Token ids, int64 `[prompts, tokens]`, of pieces of a text that lie equally far apart or of the shipped
    text, and its name. Raises QuantkitError when the text cannot be read or is too short."""
    prompts, tokens, text = settings.prompts, settings.prompt_tokens, settings.text
    if text is None:
        options = CalibrationOptions(samples=prompts, seqlen=tokens, seed=settings.seed)
        return calibration.load(checkpoint, options).tokens, "shipped"
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
    begin = torch.full((prompts, int(bos)), tokenizer.bos_token_id if bos else 0)
    return torch.cat([begin, ids], 1), text.name
