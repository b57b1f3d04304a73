"""llama.cpp's own speculation, for GGUF files: its totals, its clock.

It tells how many tokens were drafted and accepted, not pass by pass, so α comes from their mean; and not how
long drafting took, so c is what the draft takes alone over what the target takes alone, each for a token. The
distributions that it samples from it does not tell either: sampled text is measured and not proven.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

import torch
from torch import Tensor

from quantkit.models.files.checkpoint import Checkpoint
from quantkit.serving.engines import llamacpp
from quantkit.serving.engines.llamacpp import Session
from quantkit.serving.specdec import lossless, pair
from quantkit.serving.specdec.lossless import Parting
from quantkit.serving.specdec.pair import Footprint
from quantkit.serving.specdec.runs import Run
from quantkit.serving.specdec.settings import Settings

CACHE = "float16"
LIKELIEST = 40  # tokens whose logits are looked at where texts part
AROUND = 8  # places before it at which passes of one token and of many are compared


class Pairs:
    """A target in a GGUF file, for one draft after the other. Every k has a server of its own, so that they
    can take turns: their weights are the same pages of the file, their caches are not."""

    precision = "as stored"

    def __init__(self, target: Checkpoint, prompts: Tensor, settings: Settings, device: torch.device):
        """prompts: int64 `[prompts, tokens]`."""
        self._target, self._settings, self._device = target, settings, device
        self._prompts = prompts.tolist()

    @contextmanager
    def load(
        self, draft: Checkpoint | None
    ) -> Iterator[tuple[Speculation, tuple[Footprint, Footprint | None]]]:
        """The target with a draft, or with n-grams of its text, and what both take."""
        sizes = self._size(self._target), None if draft is None else self._size(draft)
        with ExitStack() as stack:

            def session(checkpoint: Checkpoint, k: int = 0) -> Session:
                context = self._settings.prompt_tokens + self._settings.tokens + max(self._settings.ks) + 1
                threads, kind = torch.get_num_threads(), self._device.type
                asked = llamacpp.parameters(
                    checkpoint.folder, context, threads=threads, kv_dtype=CACHE, device=kind
                )
                if k:
                    llamacpp.speculate(asked, k, None if draft is None else draft.folder)
                return stack.enter_context(Session(asked))

            drafting = {k: session(self._target, k) for k in (0, *self._settings.ks)}
            alone = None if draft is None else session(draft)
            yield Speculation(drafting, alone, self._prompts, self._settings), sizes

    def _size(self, checkpoint: Checkpoint) -> Footprint:
        tokens = self._settings.prompt_tokens + self._settings.tokens
        stored = pair.stored_bytes(checkpoint)
        return Footprint(stored, pair.kv_bytes(checkpoint, tokens, CACHE), stored, "ggml")


class Speculation:
    """Servers of one target by k, and of the draft alone; see `sweep.Engine`."""

    name = f"llama.cpp ({llamacpp.PACKAGE} {llamacpp.version()})"

    def __init__(
        self,
        sessions: Mapping[int, Session],
        draft: Session | None,
        prompts: Sequence[list[int]],
        settings: Settings,
    ):
        self._sessions, self._draft, self._prompts, self._settings = sessions, draft, prompts, settings
        self._draft_steps: list[float] = []

    def run(self, prompt: int, k: int, seed: int) -> Run:
        """Beside each run of the target alone there is one of the draft alone."""
        if k == 0 and self._draft is not None:
            made = self._complete(self._draft, prompt, seed)
            self._draft_steps.append(made.decode_seconds / max(1, made.decoded))
        return self._complete(self._sessions[k], prompt, seed)

    def draft_step(self) -> float | None:
        """The first one warms up. A look-up takes no time worth counting."""
        return median(self._draft_steps[1:]) if self._draft_steps else 0.0

    def _complete(self, session: Session, prompt: int, seed: int) -> Run:
        began = time.perf_counter()
        answer = session.complete(self._prompts[prompt], self._settings.tokens, **self._asked(seed))
        seconds, told = time.perf_counter() - began, answer.timings
        tokens, accepted = int(told["predicted_n"]), int(told.get("draft_n_accepted") or 0)
        return Run(
            tokens=tokens,
            seconds=seconds,
            first_seconds=told["prompt_ms"] / 1e3,
            first_tokens=1,
            passes=max(0, tokens - 1 - accepted),
            drafted=int(told.get("draft_n") or 0),
            accepted=accepted,
            decode_seconds=told["predicted_ms"] / 1e3,
            text=answer.text,
        )

    def _asked(self, seed: int) -> dict[str, object]:
        """The bare distribution, and every prompt read anew."""
        heat = self._settings.temperature
        bare = {"samplers": ["temperature"], "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return {"temperature": heat, "seed": seed, "cache_prompt": False} | (bare if heat else {})

    def uniformity(self, texts: list, seed: int, tick: Callable[[], None]) -> None:
        """It does not tell the distributions."""

    def part(self, prompt: int, k: int, own: Run, drafted: Run) -> Parting | None:
        """Texts are compared; only where they differ, tokens and logits are asked for."""
        if own.text == drafted.text:
            return None
        single = self._logits(0, self._prompts[prompt], self._settings.tokens)
        ids = [found["id"] for found in single]
        others = [found["id"] for found in self._logits(k, self._prompts[prompt], self._settings.tokens)]
        index = lossless.first_difference(ids, others)
        if index is None or index >= min(len(ids), len(others)):
            return Parting(prompt, k, index or 0, None, None, None, 0.0)
        noise = 0.0
        for place in range(max(0, index - AROUND), index + 1):
            whole = self._logits(0, [*self._prompts[prompt], *ids[:place]], 1)[0]
            noise = max(noise, _apart(_table(single[place]), _table(whole)))
        table = _table(single[index])
        drafted_token = table.get(others[index])
        margin = None if drafted_token is None else table[ids[index]] - drafted_token
        return Parting(prompt, k, index, others[index], ids[index], margin, noise)

    def _logits(self, k: int, prompt: list[int], tokens: int) -> Sequence[Mapping]:
        asked = self._asked(self._settings.seed) | {"logprobs": LIKELIEST}
        return self._sessions[k].complete(prompt, tokens, **asked).logprobs


def _table(found: Mapping) -> dict[int, float]:
    """Logarithms of probabilities, which differ as logits do."""
    return {row["id"]: row["logprob"] for row in found["top_logprobs"]}


def _apart(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    return max((abs(one[token] - other[token]) for token in one.keys() & other.keys()), default=0.0)
