"""transformers' assisted generation, every step of it noted: what was drafted, what was kept, how long.

Nothing here drafts or checks. Hooks on the target's forward pass see what it is given to check, a streamer
sees what is kept: both are public. k stays k: transformers would by default draft fewer tokens as the draft
grows unsure, and change k as it goes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.evaluation.sampling import ends_of_text
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.machine.device import synchronize
from quantkit.serving.engines import transformers as engine
from quantkit.serving.specdec import lossless, pair
from quantkit.serving.specdec.lossless import Parting, Uniformity
from quantkit.serving.specdec.pair import Footprint
from quantkit.serving.specdec.runs import Run
from quantkit.serving.specdec.settings import Settings
from quantkit.serving.specdec.theory import Step

LOOKUP_NGRAM = 2  # tokens that prompt-lookup looks for, transformers' own default


@dataclass(frozen=True)
class Sampling:
    """tokens: new ones at most. temperature 0: the likeliest token, always; else the bare distribution at
    that temperature. ends: ids that end a text."""

    tokens: int
    temperature: float
    ends: tuple[int, ...]


class Pairs:
    """A target that transformers has loaded, for one draft after the other."""

    def __init__(
        self,
        target: Checkpoint,
        prompts: Tensor,
        settings: Settings,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """prompts: int64 `[prompts, tokens]`. Raises QuantkitError for what does not fit the memory (exit
        code 5), and for models with a recurrent state (4)."""
        self.precision = str(dtype).removeprefix("torch.")
        self._target, self._dtype, self._device = target, dtype, device
        self._tokens = settings.prompt_tokens + settings.tokens
        self._prompts = prompts.to(device)
        self._sampling = Sampling(settings.tokens, settings.temperature, tuple(ends_of_text(target)))
        self._model, self._size = self._load(target)

    @contextmanager
    def load(self, draft: Checkpoint | None) -> Iterator[tuple[Assisted, tuple[Footprint, Footprint | None]]]:
        """The target with a draft, or with prompt-lookup, and what both take."""
        model, size = (None, None) if draft is None else self._load(draft)
        yield Assisted(self._model, model, self._prompts, self._sampling), (self._size, size)

    def _load(self, checkpoint: Checkpoint) -> tuple[nn.Module, Footprint]:
        loaded = engine.load(checkpoint, self._dtype, self._device, self._tokens)
        if loaded.model._is_stateful:  # transformers refuses them as targets, and fails with them as drafts
            raise QuantkitError(
                f"{checkpoint.source} keeps a recurrent state, out of which no token can be taken back",
                "speculative decoding needs a model that keeps keys and values alone",
                UNSUPPORTED,
            )
        kv = pair.kv_bytes(checkpoint, self._tokens, self.precision)
        stored = pair.stored_bytes(checkpoint)
        return loaded.model, Footprint(loaded.weight_bytes, kv, stored, loaded.kernels, loaded.note)


class Assisted:
    """A target and a draft (None: prompt-lookup) that transformers runs; see `sweep.Engine`."""

    name = f"transformers {transformers.__version__}"
    reloads = False

    def __init__(self, target: nn.Module, draft: nn.Module | None, prompts: Tensor, sampling: Sampling):
        self._target, self._draft, self._sampling = target, draft, sampling
        self._prompts = [row[None] for row in prompts]  # assisted generation takes one text at a time

    def run(self, prompt: int, k: int, seed: int) -> Run:
        return generate(self._target, self._prompts[prompt], self._sampling, seed, k, self._draft)

    def draft_step(self) -> None:
        """Every run tells it."""

    def part(self, prompt: int, k: int, own: Run, drafted: Run) -> Parting | None:
        return lossless.parting(self._target, self._prompts[prompt], own.ids, drafted.ids, (prompt, k))

    def uniformity(
        self, texts: list[tuple[int, list[int]]], seed: int, tick: Callable[[], None]
    ) -> Uniformity:
        drawn = [(self._prompts[prompt], ids) for prompt, ids in texts]
        return lossless.uniformity(drawn, self._target, self._draft, self._sampling.temperature, seed, tick)


def generate(
    target: nn.Module,
    prompt: Tensor,
    sampling: Sampling,
    seed: int,
    k: int = 0,
    draft: nn.Module | None = None,
) -> Run:
    """Continue prompt, int64 `[1, tokens]`, drafting k tokens a step with `draft`, or by looking them up in
    the text so far where that is None; k = 0: the target alone."""
    asked: dict[str, Any] = {}
    if k and draft is None:
        asked = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": LOOKUP_NGRAM}
    elif k:
        draft.generation_config = transformers.GenerationConfig(
            num_assistant_tokens=k,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
    target.generation_config = transformers.GenerationConfig()  # not what the checkpoint recommends
    device, notes = prompt.device, _Notes(prompt.device)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(torch.no_grad())
        stack.callback(target.register_forward_pre_hook(notes.begin, with_kwargs=True).remove)
        torch.manual_seed(seed)
        notes.start()
        out = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=_config(sampling, asked),
            streamer=notes,
            **({"assistant_model": draft} if k and draft is not None else {}),
        )
        seconds = notes.stop()
    return notes.run(out[0, prompt.shape[1] :].tolist(), prompt.shape[1], seconds)


def _config(sampling: Sampling, asked: dict[str, Any]) -> transformers.GenerationConfig:
    chosen = {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0} if sampling.temperature else {}
    return transformers.GenerationConfig(
        max_new_tokens=sampling.tokens,
        do_sample=sampling.temperature > 0,
        eos_token_id=list(sampling.ends) or None,
        pad_token_id=sampling.ends[0] if sampling.ends else 0,
        use_cache=True,
        **chosen,
        **asked,
    )


@dataclass
class _Notes(BaseStreamer):
    """Takes the time whenever the target begins a pass, and when its tokens have been chosen."""

    device: torch.device
    given: list[Tensor] = field(default_factory=list)  # what each pass was given
    kept: list[list[int]] = field(default_factory=list)  # what each left
    begun: list[float] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    started: float = 0.0
    _prompt_seen: bool = False

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def start(self) -> None:
        self.started = self._now()

    def stop(self) -> float:
        return self._now() - self.started

    def begin(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.given.append(kwargs["input_ids"][0])
        self.begun.append(self._now())

    def put(self, value: Tensor) -> None:
        """transformers hands over the prompt first, then the tokens of each step."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.kept.append(value.flatten().tolist())
        self.chosen.append(self._now())

    def end(self) -> None:
        """The text has ended."""

    def run(self, ids: list[int], prompt_tokens: int, seconds: float) -> Run:
        steps = []
        for place, (given, kept) in enumerate(zip(self.given, self.kept, strict=True)):
            known = prompt_tokens if place == 0 else 1  # the first pass reads the prompt, too
            steps.append(step(given.tolist()[known:], kept))
        assert sum(s.tokens for s in steps) == len(ids)
        later = list(zip(self.begun[1:], self.chosen[1:], self.chosen[:-1], strict=True))
        return Run(
            tokens=len(ids),
            ids=ids,
            seconds=seconds,
            first_seconds=self.chosen[0] - self.started,
            first_tokens=steps[0].tokens,
            passes=len(steps),
            drafted=sum(s.drafted for s in steps),
            accepted=sum(s.accepted for s in steps),
            decode_seconds=self.chosen[-1] - self.chosen[0],
            steps=steps,
            drafting=sum(begun - before for begun, _, before in later),
            checking=sum(chosen - begun for begun, chosen, _ in later),
        )


def step(drafted: Sequence[int], kept: Sequence[int]) -> Step:
    """A refused token is never the one chosen in its place: what was accepted is what agrees."""
    pairs = zip(drafted, kept, strict=False)
    accepted = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(drafted), len(kept)))
    return Step(len(drafted), accepted, len(kept))
