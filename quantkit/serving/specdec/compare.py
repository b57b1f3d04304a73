"""A target with one draft after the other: opened, checked, loaded, measured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

from quantkit.errors import UNSUPPORTED, VERIFICATION, QuantkitError
from quantkit.evaluation.generate import end_ids
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.heap import return_freed_pages
from quantkit.quantize.progress import Progress
from quantkit.serving.engines import transformers as engine
from quantkit.serving.specdec import pair, prompts, sweep
from quantkit.serving.specdec.assisted import Assisted, Sampling
from quantkit.serving.specdec.pair import Footprint
from quantkit.serving.specdec.settings import LOOKUP, Settings
from quantkit.serving.specdec.sweep import Greedy, Measured

SCHEMA = "quantkit.specdec/1"


@dataclass(frozen=True)
class Comparison:
    """All drafts of a target, and what they were measured with. prompts: source and sha256 of the ids."""

    target: str
    settings: Settings
    prompts: prompts.Prompts
    dtype: str
    device: str
    threads: int
    drafts: list[Measured]

    def record(self) -> dict[str, Any]:
        """The versioned JSON."""
        asked = asdict(self.settings) | {"text": self.prompts.source, "prompts_sha256": self.prompts.sha256}
        return {
            "schema": SCHEMA,
            "target": self.target,
            "settings": asked | {"dtype": self.dtype, "device": self.device, "threads": self.threads},
            "drafts": [_record(draft) for draft in self.drafts],
        }

    def refuse_unlike(self) -> None:
        """Raise QuantkitError (exit code 6) where a draft changed the text by more than rounding explains."""
        unlike = [draft.draft for draft in self.drafts if draft.proof is not None and not draft.proof.alike]
        if unlike:
            raise QuantkitError(
                f"text drafted by {', '.join(unlike)} is not the target's own",
                "the engine's rule that accepts tokens is at fault, or a kernel: do not use this pair",
                VERIFICATION,
                self.record(),
            )


def _record(draft: Measured) -> dict[str, Any]:
    found = asdict(draft)
    if draft.proof is not None:
        kind = "greedy" if isinstance(draft.proof, Greedy) else "sampled"
        found["proof"] = {"kind": kind, "alike": draft.proof.alike} | found["proof"]
    return found


def compare(
    target: Checkpoint,
    drafts: Sequence[Checkpoint | None],
    settings: Settings,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> Comparison:
    """Measure every draft (None: prompt-lookup) beside the target alone, each in one run with it.

    Raises QuantkitError where tokens differ or a context is too short, before anything is loaded; where
    memory does not suffice; and where transformers cannot let this model be drafted for.
    """
    models = [draft for draft in drafts if draft is not None]
    pair.check_context([target, *models], settings)
    pair.check_alike(target, models)
    found = prompts.load(target, settings.text, settings.prompts, settings.prompt_tokens, settings.seed)
    progress.phase(f"loading {target.source}")
    tokens = settings.prompt_tokens + settings.tokens
    own, big = _load(target, tokens, dtype, device)
    sampling = Sampling(settings.tokens, settings.temperature, tuple(end_ids(target)))
    ids, measured = found.ids.to(device), []
    for draft in drafts:
        name, guess, small = LOOKUP, None, None
        if draft is not None:
            progress.phase(f"loading {draft.source}")
            name = draft.source
            guess, small = _load(draft, tokens, dtype, device)
            for warning in pair.warnings(target, draft, (big, small)):
                progress.warn(warning)
        tick = _counter(progress, f"drafting by {name}", sweep.steps_of(settings))
        made = Assisted(own, guess, ids, sampling)
        try:
            measured.append(sweep.measure(name, made, len(ids), settings, (big, small), tick))
        except ValueError as error:  # transformers, of models that it cannot take tokens back from
            raise QuantkitError(
                f"transformers cannot let {target.source} be drafted for: {error}",
                "models with a recurrent state cannot take back a token",
                UNSUPPORTED,
            ) from error
        del made, guess
        gc.collect()
        return_freed_pages()
    precision = str(dtype).removeprefix("torch.")
    return Comparison(
        target.source, settings, found, precision, str(device), torch.get_num_threads(), measured
    )


def _load(
    checkpoint: Checkpoint, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[transformers.PreTrainedModel, Footprint]:
    loaded = engine.load(checkpoint, dtype, device, tokens)
    kv = pair.kv_bytes(checkpoint, tokens, dtype)
    stored = pair.stored_bytes(checkpoint)
    return loaded.model, Footprint(loaded.weight_bytes, kv, stored, loaded.kernels, loaded.note)


def _counter(progress: Progress, what: str, total: int) -> Callable[[], None]:
    """Counts runs; a proof that draws more than was planned moves the end."""
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress.counting(what, done, max(total, done))

    progress.counting(what, 0, total)
    return tick
