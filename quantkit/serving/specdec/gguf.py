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

from quantkit.evaluation.generate import first_difference
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.serving.engines import llamacpp
from quantkit.serving.engines.llamacpp import Session
from quantkit.serving.specdec import pair
from quantkit.serving.specdec.lossless import Parting
from quantkit.serving.specdec.pair import Footprint
from quantkit.serving.specdec.runs import Run
from quantkit.serving.specdec.settings import Settings

CACHE = "float16"
LIKELIEST = 40  # tokens whose logits are looked at where texts part
WARM = 4  # tokens, before anything is measured
AROUND = 8  # places before it at which passes of one token and of many are compared


class Pairs:
    """A target in a GGUF file, for one draft after the other. Every k needs a server of its own; only that of
    the k in use is loaded."""

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

            def open_for(k: int) -> tuple[Session, Session | None]:
                stack.close()  # the servers of the k before
                target = session(self._target, k)
                return target, None if k or draft is None else session(draft)

            yield Speculation(open_for, self._prompts, self._settings), sizes

    def _size(self, checkpoint: Checkpoint) -> Footprint:
        tokens = self._settings.prompt_tokens + self._settings.tokens
        stored = pair.stored_bytes(checkpoint)
        return Footprint(stored, pair.kv_bytes(checkpoint, tokens, CACHE), stored, "ggml")


class Speculation:
    """A target with a draft, for one k after the other; see `sweep.Engine`.

    open_for: closes the servers of the k before and loads those of a k: the target and, for 0, the draft.
    """

    reloads = True
    name = f"llama.cpp ({llamacpp.PACKAGE} {llamacpp.version()})"

    def __init__(
        self,
        open_for: Callable[[int], tuple[Session, Session | None]],
        prompts: Sequence[list[int]],
        settings: Settings,
    ):
        self._open_for, self._prompts, self._settings = open_for, prompts, settings
        self._loaded: tuple[int, Session, Session | None] | None = None
        self._draft_steps: list[float] = []

    def run(self, prompt: int, k: int, seed: int) -> Run:
        """Beside each run of the target alone there is one of the draft alone."""
        target, draft = self._servers(k)
        if draft is not None:
            made = self._complete(draft, prompt, seed)
            self._draft_steps.append(made.decode_seconds / max(1, made.decoded))
        return self._complete(target, prompt, seed)

    def _servers(self, k: int) -> tuple[Session, Session | None]:
        """Return the servers for k drafted tokens, warmed up: the first text of a server takes longer."""
        if self._loaded is None or self._loaded[0] != k:
            self._loaded = None
            self._loaded = k, *self._open_for(k)
            for server in filter(None, self._loaded[1:]):
                server.complete(self._prompts[0], WARM, **self._asked(0))
        return self._loaded[1:]

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
        others = [found["id"] for found in self._logits(k, self._prompts[prompt], self._settings.tokens)]
        single = self._logits(0, self._prompts[prompt], self._settings.tokens)
        ids = [found["id"] for found in single]
        index = first_difference(ids, others)
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
        return self._servers(k)[0].complete(prompt, tokens, **asked).logprobs


def _table(found: Mapping) -> dict[int, float]:
    """Logarithms of probabilities, which differ as logits do."""
    return {row["id"]: row["logprob"] for row in found["top_logprobs"]}


def _apart(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    return max((abs(one[token] - other[token]) for token in one.keys() & other.keys()), default=0.0)
