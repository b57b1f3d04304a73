"""transformers' assisted generation, with every step recorded: drafted tokens, kept tokens, seconds.

A hook on the target's forward pass records the tokens to check; a streamer records the kept ones. k is
constant here; by default transformers adapts k and drafts fewer tokens if the draft model is unsure.
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
from quantkit.errors import UNSUPPORTED, require
from quantkit.evaluation import sampling
from quantkit.evaluation.generate import first_difference
from quantkit.evaluation.sampling import Sampling, ends_of_text
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.machine.device import synchronize
from quantkit.serving.engines import transformers as engine
from quantkit.serving.specdec import lossless
from quantkit.serving.specdec.acceptance_rate import Step
from quantkit.serving.specdec.settings import Settings

LOOKUP_NGRAM = 2  # length of the n-grams that prompt-lookup looks up, transformers' default


@dataclass(frozen=True)
class Run:
    """One generated text. ids: its new tokens' ids. steps: the target's passes. seconds: time of the whole
    call. decode_seconds: time after the first pass, of which drafting: seconds between passes of the target;
    checking: seconds from a pass's start until its tokens are chosen."""

    ids: list[int]
    steps: list[Step]
    seconds: float
    decode_seconds: float
    drafting: float
    checking: float

    @property
    def decoded(self) -> int:
        """Number of new tokens after those of the first pass."""
        return len(self.ids) - self.steps[0].tokens


class Pair:
    """A target, measured with one draft after the other. prompts: token ids, int64 `[prompts, tokens]`.

    Raises QuantkitError if a model does not fit the memory (exit code 5) or has a recurrent state (4).
    """

    name = f"transformers {transformers.__version__}"

    def __init__(
        self,
        target: Checkpoint,
        prompts: Tensor,
        settings: Settings,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._settings, self._device, self._dtype = settings, device, dtype
        self.precision = str(dtype).removeprefix("torch.")
        self._prompts = prompts.to(device)
        self._sampling, self._ends = Sampling(settings.tokens, settings.temperature), ends_of_text(target)
        self._model, self._size = self._load(target)
        self.draft: nn.Module | None = None

    def load(self, draft: Checkpoint | None) -> dict[str, Any]:
        """Load a draft (None: prompt-lookup); return the sizes of target and draft, see `_load`."""
        self.draft, size = (None, None) if draft is None else self._load(draft)
        return {"target_memory": self._size, "draft_memory": size}

    def close(self) -> None:
        """Free the draft."""
        self.draft = None

    def _load(self, checkpoint: Checkpoint) -> tuple[nn.Module, dict[str, Any]]:
        """Return the model and {weights: bytes in memory, kv: bytes of the cache of one text or None, stored:
        bytes on disk, kernels: name, note: why weights were decoded}."""
        tokens = self._settings.prompt_tokens + self._settings.tokens
        loaded = engine.load(checkpoint, self._dtype, self._device, tokens)
        # transformers refuses recurrent models as targets, and fails with them as drafts
        what = f"{checkpoint.source} keeps a recurrent state, which cannot take tokens back"
        require(not loaded.model._is_stateful, what, "choose a model with attention alone", UNSUPPORTED)
        return loaded.model, {
            "weights": loaded.weight_bytes,
            "kv": cache_bytes(checkpoint.folder, tokens, self.precision),
            "stored": sum(info.nbytes for info in checkpoint.infos.values()),
            "kernels": loaded.kernels,
            "note": loaded.note,
        }

    def run(self, prompt: int, k: int, seed: int) -> Run:
        """Continue prompt number `prompt`, drafting k tokens per pass; k = 0: the target alone."""
        how = replace(self._sampling, seed=seed)
        return generate(self._model, self._prompts[prompt, None], how, self._ends, k, self.draft)

    def part(self, prompt: int, k: int, own: Run, drafted: Run) -> dict[str, Any] | None:
        """Return the first difference between a drafted text and the target's own; see `lossless.parting`."""
        return lossless.parting(self._model, self._prompts[prompt, None], own.ids, drafted.ids)


def generate(
    target: nn.Module,
    prompt: Tensor,
    how: Sampling,
    ends: list[int],
    k: int = 0,
    draft: nn.Module | None = None,
) -> Run:
    """Continue a prompt, int64 `[1, tokens]`, drafting k tokens per step; k = 0: the target alone. draft: the
    draft model; None: prompt-lookup, which copies from the text so far. ends: ids that end a text."""
    drafting_options, notes = {}, _Notes(prompt.device)
    if k and draft is None:
        drafting_options = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": LOOKUP_NGRAM}
    elif k:
        draft.generation_config = transformers.GenerationConfig(
            num_assistant_tokens=k,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
    target.generation_config = transformers.GenerationConfig()  # not the checkpoint's settings
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
    """Records the tokens of each pass of the target, when it begins, and when its tokens are chosen."""

    device: torch.device
    given: list[Tensor] = field(default_factory=list)  # input ids of each pass
    kept: list[list[int]] = field(default_factory=list)  # the prompt, then the tokens kept by each pass
    begun: list[float] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)  # the first entry is the start of generation

    def now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def begin(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.given.append(kwargs["input_ids"][0])
        self.begun.append(self.now())

    def put(self, value: Tensor) -> None:
        """Store the tokens of a step. transformers calls this with the prompt first."""
        self.kept.append(value.flatten().tolist())
        if len(self.kept) > 1:
            self.chosen.append(self.now())

    def end(self) -> None:
        """Do nothing; transformers calls this when the text has ended."""

    def run(self, ids: list[int], prompt_tokens: int, ended: float) -> Run:
        steps = []
        for place, (given, kept) in enumerate(zip(self.given, self.kept[1:], strict=True)):
            known = prompt_tokens if place == 0 else 1  # the first pass also reads the prompt
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
    """Return the step; accepted: number of leading `drafted` tokens that equal the `kept` ones."""
    parted = first_difference(drafted, kept)
    return Step(len(drafted), len(drafted) if parted is None else parted, len(kept))
