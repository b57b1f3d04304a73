"""transformers' assisted generation, with every step recorded: drafted tokens, kept tokens, seconds.

Nothing here drafts or checks. A hook on the target's forward pass sees the tokens to check, a streamer the
kept ones. k is constant: by default transformers drafts fewer tokens where the draft is unsure, and adapts k.
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

from quantkit.capacity.source import cache_bytes
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.evaluation import sampling
from quantkit.evaluation.generate import first_difference
from quantkit.evaluation.sampling import Sampling, ends_of_text
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.machine.device import synchronize
from quantkit.serving.engines import transformers as engine
from quantkit.serving.specdec import lossless
from quantkit.serving.specdec.acceptance_rate import Step
from quantkit.serving.specdec.settings import Settings

LOOKUP_NGRAM = 2  # tokens that prompt-lookup looks for, transformers' own default


@dataclass(frozen=True)
class Run:
    """One text: the ids of its new tokens (of llama.cpp their texts), and each pass of the target. seconds:
    of the whole call; decode_seconds: after the first pass. drafting, checking: its parts, between passes of
    the target, and from the start of a pass until its tokens are chosen."""

    ids: list[int] | list[str]
    steps: list[Step]
    seconds: float
    decode_seconds: float
    drafting: float
    checking: float

    @property
    def decoded(self) -> int:
        """Tokens after those of the first pass."""
        return len(self.ids) - self.steps[0].tokens


class Pair:
    """A target for one draft after the other (None: prompt-lookup), and prompts, int64 `[prompts, tokens]`.

    Raises QuantkitError for what does not fit the memory (exit code 5), and for models with a recurrent state
    (4).
    """

    name = f"transformers {transformers.__version__}"
    reloads = False

    def __init__(
        self,
        target: Checkpoint,
        prompts: Tensor,
        settings: Settings,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._target, self._settings, self._device, self._dtype = target, settings, device, dtype
        self.precision = str(dtype).removeprefix("torch.")
        self._prompts = prompts.to(device)
        self._sampling, self._ends = Sampling(settings.tokens, settings.temperature), ends_of_text(target)
        self._model, self._size = self._load(target)
        self.draft: nn.Module | None = None

    def load(self, draft: Checkpoint | None) -> dict[str, Any]:
        """Load a draft; return the memory of target and draft."""
        self.draft, size = (None, None) if draft is None else self._load(draft)
        return {"target_memory": self._size, "draft_memory": size}

    def close(self) -> None:
        """Free the draft."""
        self.draft = None

    def _load(self, checkpoint: Checkpoint) -> tuple[nn.Module, dict[str, Any]]:
        """Return the model; bytes of its weights in memory, of keys and values of one text (None where
        unknown), and of the tensors on disk; its kernels, and why weights are not packed."""
        tokens = self._settings.prompt_tokens + self._settings.tokens
        loaded = engine.load(checkpoint, self._dtype, self._device, tokens)
        if loaded.model._is_stateful:  # transformers refuses them as targets, and fails with them as drafts
            raise QuantkitError(
                f"{checkpoint.source} keeps a recurrent state, which cannot take tokens back",
                "choose a model with attention alone",
                UNSUPPORTED,
            )
        return loaded.model, {
            "weights": loaded.weight_bytes,
            "kv": cache_bytes(checkpoint.folder, tokens, self.precision),
            "stored": sum(info.nbytes for info in checkpoint.infos.values()),
            "kernels": loaded.kernels,
            "note": loaded.note,
        }

    def run(self, prompt: int, k: int, seed: int) -> Run:
        """Continue a prompt, by its number; k = 0: the target alone."""
        how = replace(self._sampling, seed=seed)
        return generate(self._model, self._prompts[prompt, None], how, self._ends, k, self.draft)

    def part(self, prompt: int, k: int, own: Run, drafted: Run) -> dict[str, Any] | None:
        """Return the first difference of a drafted text: see `lossless.parting`."""
        return lossless.parting(self._model, self._prompts[prompt, None], own.ids, drafted.ids)


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
    drafting_options, notes = {}, _Notes(prompt.device)
    if k and draft is None:
        drafting_options = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": LOOKUP_NGRAM}
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
        out = sampling.generate(target, prompt, how, ends, drafting_options, streamer=notes, **given)
        ended = notes.now()
    finally:
        hook.remove()
    return notes.run(out[0, prompt.shape[1] :].tolist(), prompt.shape[1], ended)


@dataclass
class _Notes(BaseStreamer):
    """Recorder of the times when the target begins a pass, and when its tokens have been chosen."""

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
            ids=ids,
            steps=steps,
            seconds=ended - began,
            decode_seconds=self.chosen[-1] - first,
            drafting=sum(begun - before for begun, _, before in later),
            checking=sum(chosen - begun for begun, chosen, _ in later),
        )


def step(drafted: Sequence[int], kept: Sequence[int]) -> Step:
    """Return the step of drafted and kept tokens: accepted tokens are those that agree."""
    parted = first_difference(drafted, kept)
    return Step(len(drafted), len(drafted) if parted is None else parted, len(kept))
