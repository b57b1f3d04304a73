"""A target with one draft after the other: opened, checked, loaded, measured."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
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
from quantkit.serving.specdec.measure import Engine, Footprint, Measured, measure, runs_of
from quantkit.serving.specdec.settings import LOOKUP, Settings
from quantkit.tables import megabytes
from quantkit.text import calibration

SCHEMA = "quantkit.specdec/1"


@dataclass(frozen=True)
class Comparison:
    """All drafts of a target, and what they were measured with. text: its name, `shipped` for that one;
    prompts_sha256: of the prompts' token ids, int64 little-endian."""

    target: str
    settings: Settings
    text: str
    prompts_sha256: str
    dtype: str
    device: str
    threads: int
    drafts: list[Measured]

    def record(self) -> dict[str, Any]:
        """The versioned JSON."""
        told, asked = asdict(self), asdict(self.settings)
        del asked["k"], asked["engine"]
        known = {name: told[name] for name in ("text", "prompts_sha256", "dtype", "device", "threads")}
        for draft, row in zip(self.drafts, told["drafts"], strict=True):
            if draft.proof is not None:
                row["proof"]["alike"] = draft.proof.alike
        settings = {"ks": self.settings.ks} | asked | known
        return {"schema": SCHEMA, "target": self.target, "settings": settings, "drafts": told["drafts"]}

    def refuse_unlike(self) -> None:
        """Raise QuantkitError (exit code 6) where a draft changed the text by more than rounding explains."""
        unlike = [draft.draft for draft in self.drafts if draft.proof is not None and not draft.proof.alike]
        if unlike:
            raise QuantkitError(
                f"text drafted by {', '.join(unlike)} is not the target's own",
                "the rule that accepts tokens is at fault, or a kernel: do not use this pair; a test "
                "of sampled text errs once in a thousand runs: see what another --seed says",
                VERIFICATION,
                self.record(),
            )


def compare(
    target: Checkpoint, drafts: Sequence[Checkpoint | None], settings: Settings, progress: Progress
) -> Comparison:
    """Measure every draft (None: prompt-lookup) beside the target alone, each in one run with it.

    Raises QuantkitError where tokens differ or a context is too short, before anything is loaded; where
    memory does not suffice; and where an engine cannot do it.
    """
    device = choose_device(settings.device)
    dtype = shared_dtype(settings.dtype, target, device)
    models = [target, *(draft for draft in drafts if draft is not None)]
    folders = [made.source for made in models if not made.folder.is_file()]
    name, _ = choose_local(settings.engine, folders)
    _check_context(models, settings)
    _check_alike(*models)
    ids, text = _prompts(target, settings)
    progress.phase(f"loading {target.source}")
    if name == "llama.cpp":
        from quantkit.serving.specdec.llamacpp import Speculation

        engine: Engine = Speculation(target, ids, settings, device)
    else:
        from quantkit.serving.specdec.transformers import Assisted

        engine = Assisted(target, ids, settings, dtype, device)
    measured = []
    for draft in drafts:
        progress.phase(f"loading {draft.source if draft else LOOKUP}")
        try:
            sizes = engine.load(draft)
            if draft is not None:
                _warn(target, draft, *sizes, progress)
            tick = _counter(progress, f"drafting by {draft.source if draft else LOOKUP}", runs_of(settings))
            measured.append(measure(draft, engine, settings, sizes, tick))
        finally:
            engine.close()
        gc.collect()
        return_freed_pages()
    sha256 = hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()
    threads = torch.get_num_threads()
    return Comparison(target.source, settings, text, sha256, engine.precision, str(device), threads, measured)


def _counter(progress: Progress, what: str, total: int) -> Callable[[], None]:
    """Counts runs; a proof that draws more than was planned moves the end."""
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress.counting(what, done, max(total, done))

    progress.counting(what, 0, total)
    return tick


def _check_alike(target: Checkpoint, *drafts: Checkpoint) -> None:
    """Raise QuantkitError (exit code 4) where a draft's tokens are not the target's, and say in what.

    Logits must be as wide as well: the rule that accepts compares the two distributions number by number.
    """
    size = target.text_config.vocab_size
    own = tokenizer_sha256(target.tokenizer, size)
    for draft in drafts:
        other = draft.text_config.vocab_size
        why = ""
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


def _check_context(checkpoints: Sequence[Checkpoint], settings: Settings) -> None:
    """Raise QuantkitError (exit code 2) where prompt and new tokens are more than a model was made for."""
    needed = settings.prompt_tokens + settings.tokens
    for checkpoint in checkpoints:
        context = checkpoint.context
        if context is not None and needed > context:
            raise QuantkitError(
                f"{checkpoint.source} was made for {context} tokens; prompt and new tokens make {needed}",
                f"choose --prompt-tokens and --tokens of at most {context} together",
                USAGE,
            )


def _warn(
    target: Checkpoint, draft: Checkpoint, big: Footprint, small: Footprint, progress: Progress
) -> None:
    """Say what makes a draft unlikely to pay, before it is tried."""
    if small.weights > big.weights:
        progress.warn(
            f"{draft.source} ({megabytes(small.weights)} in memory) is larger than its target "
            f"{target.source} ({megabytes(big.weights)}): it cannot draft faster than the target writes"
        )
    elif small.weights == big.weights and small.note:
        progress.warn(
            f"{draft.source} lies decoded in memory, as large as the target ({small.note}): drafting a token "
            "takes as long as writing one"
        )


def _prompts(checkpoint: Checkpoint, settings: Settings) -> tuple[Tensor, str]:
    """Token ids, int64 `[prompts, tokens]`, spread evenly over a text or of the shipped one, and its name.

    Raises QuantkitError when the text cannot be read or is too short.
    """
    if settings.text is None:
        options = CalibrationOptions(
            samples=settings.prompts, seqlen=settings.prompt_tokens, seed=settings.seed
        )
        return calibration.load(checkpoint, options).tokens, "shipped"
    return cut(checkpoint, settings.text, settings.prompts, settings.prompt_tokens), settings.text.name


def cut(checkpoint: Checkpoint, text: Path, prompts: int, tokens: int) -> Tensor:
    """Return pieces of a text that lie equally far apart, int64 `[prompts, tokens]`."""
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
