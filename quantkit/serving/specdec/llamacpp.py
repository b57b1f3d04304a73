"""llama.cpp's own speculation, for GGUF files: its totals, its clock.

It tells how many tokens were drafted and accepted, not pass by pass, so α comes from their mean; and not how
long drafting took, so c is what the draft takes alone over what the target takes alone, each for a token. The
distributions that it samples from it does not tell either: sampled text is measured and not proven.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.evaluation.generate import first_difference
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.serving.engines import llamacpp
from quantkit.serving.engines.llamacpp import Session
from quantkit.serving.specdec.lossless import Parting
from quantkit.serving.specdec.measure import Engine, Footprint, Run
from quantkit.serving.specdec.settings import Settings

LIKELIEST = 40  # tokens whose logits are looked at where texts part
WARM = 4  # tokens, before anything is measured
AROUND = 8  # places before it at which passes of one token and of many are compared


class Speculation(Engine):
    """A target in a GGUF file. Every k needs a server of its own; only that of the k in use is loaded, beside
    none or, for k = 0, the draft by itself. It does not tell distributions."""

    name = f"llama.cpp ({llamacpp.PACKAGE} {llamacpp.version()})"
    precision, cache = "as stored", "float16"
    reloads = True

    def __init__(self, target: Checkpoint, prompts: Tensor, settings: Settings, device: torch.device):
        super().__init__(target, prompts, settings, device)
        self._texts = prompts.tolist()
        self._sessions: list[Session] = []  # the target, and the draft where it runs by itself
        self._k: int | None = None

    def load(self, draft: Checkpoint | None) -> tuple[Footprint, Footprint | None]:
        self._draft, self._draft_steps = draft, []
        return self.footprint(self.target), draft and self.footprint(draft)

    def close(self) -> None:
        while self._sessions:
            self._sessions.pop().__exit__()
        self._k = None

    def _open(self, checkpoint: Checkpoint, k: int) -> None:
        context = self.settings.prompt_tokens + self.settings.tokens + max(self.settings.ks) + 1
        asked = llamacpp.parameters(
            checkpoint.folder,
            context,
            threads=torch.get_num_threads(),
            kv_dtype=self.cache,
            device=self.device.type,
        )
        if k:
            llamacpp.speculate(asked, k, None if self._draft is None else self._draft.folder)
        self._sessions.append(Session(asked))

    def _servers(self, k: int) -> list[Session]:
        """Return the servers for k drafted tokens, warmed up: the first text of a server takes longer."""
        if self._k != k:
            self.close()  # those of the k before
            self._open(self.target, k)
            if self._draft is not None and not k:
                self._open(self._draft, 0)
            self._k = k
            for server in self._sessions:
                server.complete(self._texts[0], WARM, **self._asked(0))
        return self._sessions

    def run(self, prompt: int, k: int, seed: int) -> Run:
        """Beside each run of the target alone there is one of the draft alone."""
        target, *draft = self._servers(k)
        for session in draft:
            made = self._complete(session, prompt, seed)
            self._draft_steps.append(made.decode_seconds / max(1, made.decoded))
        return self._complete(target, prompt, seed)

    def draft_step(self) -> float:
        """The first one warms up. A look-up takes no time worth counting."""
        return float(np.median(self._draft_steps[1:])) if self._draft_steps else 0.0

    def _complete(self, session: Session, prompt: int, seed: int) -> Run:
        began = time.perf_counter()
        answer = session.complete(self._texts[prompt], self.settings.tokens, **self._asked(seed))
        seconds, told = time.perf_counter() - began, answer.timings
        tokens, accepted = int(told["predicted_n"]), int(told.get("draft_n_accepted") or 0)
        return Run(
            tokens=tokens,
            seconds=seconds,
            first_tokens=1,
            passes=max(0, tokens - 1 - accepted),
            drafted=int(told.get("draft_n") or 0),
            accepted=accepted,
            decode_seconds=told["predicted_ms"] / 1e3,
            text=answer.text,
        )

    def _asked(self, seed: int) -> dict[str, Any]:
        """The bare distribution, and every prompt read anew."""
        heat = self.settings.temperature
        bare = {"samplers": ["temperature"], "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return {"temperature": heat, "seed": seed, "cache_prompt": False} | (bare if heat else {})

    def part(self, prompt: int, k: int, own: Run, drafted: Run) -> Parting | None:
        """Texts are compared; only where they differ, tokens and logits are asked for."""
        if own.text == drafted.text:
            return None
        others = [found["id"] for found in self._logits(k, self._texts[prompt], self.settings.tokens)]
        single = self._logits(0, self._texts[prompt], self.settings.tokens)
        ids = [found["id"] for found in single]
        index = first_difference(ids, others)
        if index is None or index >= min(len(ids), len(others)):
            return Parting(prompt, k, index or 0, None, None, None, 0.0)
        noise = 0.0
        for place in range(max(0, index - AROUND), index + 1):
            one = _table(single[place])
            many = _table(self._logits(0, [*self._texts[prompt], *ids[:place]], 1)[0])
            noise = max([noise, *(abs(one[token] - many[token]) for token in one.keys() & many.keys())])
        table = _table(single[index])
        drafted_token = table.get(others[index])
        margin = None if drafted_token is None else table[ids[index]] - drafted_token
        return Parting(prompt, k, index, others[index], ids[index], margin, noise)

    def _logits(self, k: int, prompt: list[int], tokens: int) -> Sequence[Mapping]:
        asked = self._asked(self.settings.seed) | {"logprobs": LIKELIEST}
        return self._servers(k)[0].complete(prompt, tokens, **asked).logprobs


def _table(found: Mapping) -> dict[int, float]:
    """Logarithms of probabilities, which differ as logits do."""
    return {row["id"]: row["logprob"] for row in found["top_logprobs"]}
