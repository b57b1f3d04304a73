"""A target with one draft after the other: opened, checked, loaded, measured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quantkit.errors import VERIFICATION, QuantkitError
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.machine.memory import return_freed_pages
from quantkit.quantize.progress import Progress
from quantkit.serving.specdec import assisted, gguf, pair, prompts, sweep
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
                "the rule that accepts tokens is at fault, or a kernel: do not use this pair; a test "
                "of sampled text errs once in a thousand runs: see what another --seed says",
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
    engine: str,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> Comparison:
    """Measure every draft (None: prompt-lookup) beside the target alone, each in one run with it.

    engine: what `choose_local` says. Raises QuantkitError where tokens differ or a context is too short,
    before anything is loaded; where memory does not suffice; and where an engine cannot do it.
    """
    models = [draft for draft in drafts if draft is not None]
    pair.check_context([target, *models], settings)
    pair.check_alike(target, models)
    found = prompts.load(target, settings.text, settings.prompts, settings.prompt_tokens, settings.seed)
    progress.phase(f"loading {target.source}")
    if engine == "llama.cpp":
        pairs: gguf.Pairs | assisted.Pairs = gguf.Pairs(target, found.ids, settings, device)
    else:
        pairs = assisted.Pairs(target, found.ids, settings, dtype, device)
    measured = []
    for draft in drafts:
        name = LOOKUP if draft is None else draft.source
        progress.phase(f"loading {name}")
        with pairs.load(draft) as (made, sizes):
            if draft is not None:
                for warning in pair.warnings(target, draft, sizes):
                    progress.warn(warning)
            tick = _counter(progress, f"drafting by {name}", sweep.steps_of(settings))
            measured.append(sweep.measure(name, made, len(found.ids), settings, sizes, tick))
        gc.collect()
        return_freed_pages()
    return Comparison(
        target.source, settings, found, pairs.precision, str(device), torch.get_num_threads(), measured
    )


def _counter(progress: Progress, what: str, total: int) -> Callable[[], None]:
    """Counts runs; a proof that draws more than was planned moves the end."""
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress.counting(what, done, max(total, done))

    progress.counting(what, 0, total)
    return tick
