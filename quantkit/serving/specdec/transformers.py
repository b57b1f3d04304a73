"""transformers' assisted generation, every step of it noted: what was drafted, what was kept, how long.

Nothing here drafts or checks. Hooks on the target's forward pass see what it is given to check, a streamer
sees what is kept: both are public. k stays k: transformers would by default draft fewer tokens as the draft
grows unsure, and change k as it goes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.evaluation import sampling
from quantkit.evaluation.generate import first_difference
from quantkit.evaluation.sampling import Sampling, ends_of_text
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.machine.device import synchronize
from quantkit.serving.engines import transformers as engine
from quantkit.serving.specdec import lossless
from quantkit.serving.specdec.acceptance_rate import Step
from quantkit.serving.specdec.lossless import Parting, Uniformity
from quantkit.serving.specdec.measure import Engine, Footprint, Run
from quantkit.serving.specdec.settings import Settings

LOOKUP_NGRAM = 2  # tokens that prompt-lookup looks for, transformers' own default


class Assisted(Engine):
    """A target and a draft that transformers runs.

    Raises QuantkitError for what does not fit the memory (exit code 5), and for models with a recurrent state
    (4).
    """

    name = f"transformers {engine.version()}"

    def __init__(
        self,
        target: Checkpoint,
        prompts: Tensor,
        settings: Settings,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__(target, prompts.to(device), settings, device)
        self.precision = self.cache = str(dtype).removeprefix("torch.")
        self._dtype = dtype
        self._sampling, self._ends = Sampling(settings.tokens, settings.temperature), ends_of_text(target)
        self._model, self._size = self._load(target)
        self._draft: nn.Module | None = None

    def load(self, draft: Checkpoint | None) -> tuple[Footprint, Footprint | None]:
        self._draft, size = (None, None) if draft is None else self._load(draft)
        return self._size, size

    def close(self) -> None:
        self._draft = None

    def _load(self, checkpoint: Checkpoint) -> tuple[nn.Module, Footprint]:
        tokens = self.settings.prompt_tokens + self.settings.tokens
        loaded = engine.load(checkpoint, self._dtype, self.device, tokens)
        if loaded.model._is_stateful:  # transformers refuses them as targets, and fails with them as drafts
            raise QuantkitError(
                f"{checkpoint.source} keeps a recurrent state, out of which no token can be taken back",
                "speculative decoding needs a model that keeps keys and values alone",
                UNSUPPORTED,
            )
        return loaded.model, self.footprint(checkpoint, loaded)

    def run(self, prompt: int, k: int, seed: int) -> Run:
        how = replace(self._sampling, seed=seed)
        return generate(self._model, self.prompts[prompt, None], how, self._ends, k, self._draft)

    def part(self, prompt: int, k: int, own: Run, drafted: Run) -> Parting | None:
        return lossless.parting(self._model, self.prompts[prompt, None], own.ids, drafted.ids, (prompt, k))

    def uniformity(self, texts: Sequence[tuple[int, list[int]]], seed: int) -> Uniformity:
        drawn = ((self.prompts[prompt, None], ids) for prompt, ids in texts)
        return lossless.uniformity(drawn, self._model, self._draft, self._sampling.temperature, seed)


def generate(
    target: nn.Module,
    prompt: Tensor,
    how: Sampling,
    ends: list[int],
    k: int = 0,
    draft: nn.Module | None = None,
) -> Run:
    """Continue prompt, int64 `[1, tokens]`, drafting k tokens a step with `draft`, or by looking them up in
    the text so far where that is None; k = 0: the target alone. ends: ids that end a text."""
    asked, notes = {}, _Notes(prompt.device)
    if k and draft is None:
        asked = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": LOOKUP_NGRAM}
    elif k:
        draft.generation_config = transformers.GenerationConfig(
            num_assistant_tokens=k,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
    target.generation_config = transformers.GenerationConfig()  # not what the checkpoint recommends
    hook = target.register_forward_pre_hook(notes.begin, with_kwargs=True)
    try:
        notes.chosen.append(notes.now())
        given = {"assistant_model": draft} if k and draft is not None else {}
        out = sampling.generate(target, prompt, how, ends, asked, streamer=notes, **given)
        ended = notes.now()
    finally:
        hook.remove()
    return notes.run(out[0, prompt.shape[1] :].tolist(), prompt.shape[1], ended)


@dataclass
class _Notes(BaseStreamer):
    """Takes the time whenever the target begins a pass, and when its tokens have been chosen."""

    device: torch.device
    given: list[Tensor] = field(default_factory=list)  # what each pass was given
    kept: list[list[int]] = field(default_factory=list)  # the prompt, then what each pass left
    begun: list[float] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)  # first, when all began

    def now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def begin(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.given.append(kwargs["input_ids"][0])
        self.begun.append(self.now())

    def put(self, value: Tensor) -> None:
        """transformers hands over the prompt first, then the tokens of each step."""
        self.kept.append(value.flatten().tolist())
        if len(self.kept) > 1:
            self.chosen.append(self.now())

    def end(self) -> None:
        """The text has ended."""

    def run(self, ids: list[int], prompt_tokens: int, ended: float) -> Run:
        steps = []
        for place, (given, kept) in enumerate(zip(self.given, self.kept[1:], strict=True)):
            known = prompt_tokens if place == 0 else 1  # the first pass reads the prompt, too
            steps.append(step(given.tolist()[known:], kept))
        assert sum(s.tokens for s in steps) == len(ids)
        began, first, *_ = self.chosen
        later = list(zip(self.begun[1:], self.chosen[2:], self.chosen[1:-1], strict=True))
        return Run(
            tokens=len(ids),
            ids=ids,
            seconds=ended - began,
            first_tokens=steps[0].tokens,
            passes=len(steps),
            drafted=sum(s.drafted for s in steps),
            accepted=sum(s.accepted for s in steps),
            decode_seconds=self.chosen[-1] - first,
            steps=steps,
            drafting=sum(begun - before for begun, _, before in later),
            checking=sum(chosen - begun for begun, chosen, _ in later),
        )


def step(drafted: Sequence[int], kept: Sequence[int]) -> Step:
    """A refused token is never the one chosen in its place: what was accepted is what agrees."""
    parted = first_difference(drafted, kept)
    return Step(len(drafted), len(drafted) if parted is None else parted, len(kept))
