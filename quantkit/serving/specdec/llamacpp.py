"""llama.cpp's own speculative decoding with GGUF files.

llama.cpp reports its totals with every streamed token; their differences give each pass of the target. It
does not time drafts. So c is measured by running each model alone, and v is the rest of the time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.capacity.source import cache_bytes
from quantkit.evaluation.generate import first_difference
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.serving.engines import llamacpp
from quantkit.serving.engines.llamacpp import Session
from quantkit.serving.specdec.acceptance_rate import Step
from quantkit.serving.specdec.settings import Settings
from quantkit.serving.specdec.transformers import LOOKUP_NGRAM, Pair, Run

KV = "float16"  # type of keys and values, llama.cpp's default
LIKELIEST = 40  # most likely tokens whose log-probabilities are requested
WARM_UP = 4  # tokens generated before a server is measured
NEARBY = 8  # positions before a difference at which noise is measured
TOTALS = ("predicted_n", "draft_n", "draft_n_accepted")


class LlamaCppPair(Pair):
    """A target in a GGUF file, measured with one draft after the other. Each k needs a new server; only one k
    is loaded at a time. Raises QuantkitError (exit code 4) if llama.cpp cannot load a file."""

    name = f"llama.cpp (xllamacpp {llamacpp.version()})"
    precision, reloads = "as stored", True

    def __init__(self, target: Checkpoint, prompts: Tensor, settings: Settings, device: torch.device, *_):
        self._target, self._settings, self._device = target, settings, device
        self._prompts = prompts.tolist()
        self._sessions: list[Session] = []
        self._k: int | None = None

    def load(self, draft: Checkpoint | None) -> dict[str, Any]:
        """Select a draft (None: prompt-lookup); return the sizes of target and draft in bytes."""
        self._draft, self._draft_seconds = draft, []
        return {"target_memory": self._size(self._target), "draft_memory": draft and self._size(draft)}

    def close(self) -> None:
        """Free the models."""
        while self._sessions:
            self._sessions.pop().close()
        self._k = None

    def _size(self, checkpoint: Checkpoint) -> dict[str, Any]:
        stored = sum(info.nbytes for info in checkpoint.infos.values())
        kv = cache_bytes(checkpoint.folder, self._settings.prompt_tokens + self._settings.tokens, KV)
        return {"weights": stored, "kv": kv, "stored": stored, "kernels": "ggml", "note": ""}

    def _open(self, checkpoint: Checkpoint, k: int) -> None:
        """Load a server that drafts k tokens per pass, and warm it up."""
        context = self._settings.prompt_tokens + self._settings.tokens + k + 1
        threads, device = torch.get_num_threads(), self._device.type
        made = llamacpp.parameters(checkpoint.folder, context, 1, threads, KV, device)
        kinds, speculative = llamacpp.library().common_speculative_type, made.speculative
        if k and self._draft is None:
            speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            speculative.ngram_simple.size_n, speculative.ngram_simple.size_m = LOOKUP_NGRAM, k
        elif k:
            speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            draft, speculative.draft.mparams.path = speculative.draft, str(self._draft.folder)
            draft.n_max, draft.n_min, draft.p_min = k, 0, 0.0  # k tokens, even where the draft is unsure
            draft.n_gpu_layers = made.n_gpu_layers
            draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = threads
        self._sessions.append(Session(made))
        self._stream(self._sessions[-1], self._prompts[0], WARM_UP)

    def _servers(self, k: int) -> list[Session]:
        """Return the servers for k: the target's; for k = 0 also the draft's, which then runs alone."""
        if self._k != k:
            self.close()
            self._open(self._target, k)
            if self._draft is not None and not k:
                self._open(self._draft, 0)
            self._k = k
        return self._sessions

    def _stream(
        self, session: Session, prompt: Sequence[int], tokens: int, seed: int = 0, **fields: Any
    ) -> list[Mapping[str, Any]]:
        """Return llama.cpp's chunks of a continuation. Sampling uses no top-k or top-p."""
        fields |= {"temperature": self._settings.temperature, "seed": seed, "cache_prompt": False}
        fields |= {"samplers": ["temperature"]} if self._settings.temperature else {}
        chunks: list[Mapping[str, Any]] = []
        session.stream({"prompt": prompt, "n_predict": tokens, **fields}, chunks.append)
        return chunks

    def run(self, prompt: int, k: int, seed: int) -> Run:
        """Continue prompt number `prompt`. k = 0: run the target alone, and the draft alone to time it."""
        target, *draft = self._servers(k)
        for session in draft:
            alone = self._run(session, prompt, seed)
            self._draft_seconds.append(alone.decode_seconds / max(1, alone.decoded))
        return self._run(target, prompt, seed)

    def _run(self, session: Session, prompt: int, seed: int) -> Run:
        began, tokens = time.perf_counter(), self._settings.tokens
        chunks = self._stream(session, self._prompts[prompt], tokens, seed, timings_per_token=True)
        seconds, decoding = time.perf_counter() - began, chunks[-1]["timings"]["predicted_ms"] / 1e3
        ids, steps = passes(chunks)
        token = float(np.median(self._draft_seconds)) if self._draft_seconds else 0.0  # look-ups take none
        drafting = min(decoding, sum(step.drafted for step in steps) * token)
        return Run(ids, steps, seconds, decoding, drafting, decoding - drafting)

    def part(self, prompt: int, k: int, own: Run, drafted: Run) -> dict[str, Any] | None:
        """Return the first difference of a drafted text: the fields of `lossless.parting`, or None.

        Texts that differ are generated again with logits. noise is measured on the most likely tokens only,
        at positions near the difference.
        """
        if own.ids == drafted.ids:
            return None
        ids = self._prompts[prompt]
        others, single = (self._logits(number, ids, self._settings.tokens) for number in (k, 0))
        texts = [[token for token, _ in rows] for rows in (single, others)]
        index, noise = first_difference(*texts), 0.0
        if index is None or index >= min(map(len, texts)):
            index = first_difference(own.ids, drafted.ids)
            return dict(index=index, noise=noise, token=None, expected=None, margin=None, tie=False)
        for place in range(max(0, index - NEARBY), index + 1):
            one, many = single[place][1], self._logits(0, [*ids, *texts[0][:place]], 1)[0][1]
            noise = max([noise, *(abs(one[token] - many[token]) for token in one.keys() & many.keys())])
        (expected, token), table = (text[index] for text in texts), single[index][1]
        margin = table[expected] - table.get(token, min(table.values()))
        found = dict(index=index, token=token, expected=expected, margin=margin)
        return found | {"noise": noise, "tie": margin <= 2 * noise}

    def _logits(self, k: int, prompt: Sequence[int], tokens: int) -> list[tuple[int, dict[int, float]]]:
        """Return (id, {id: log-probability of the most likely ids}) of each new token."""
        chunks = self._stream(self._servers(k)[0], prompt, tokens, logprobs=LIKELIEST)
        found = [choice.get("logprobs") or {} for chunk in chunks for choice in chunk["choices"]]
        rows = [row for part in found for row in part.get("content") or ()]
        return [(row["id"], {top["id"]: top["logprob"] for top in row["top_logprobs"]}) for row in rows]


def passes(chunks: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Step]]:
    """Return the text of each new token, and the passes of the target, from streamed totals.

    Tokens of one pass have the same time. A token that ends inside a character (text "") is sent with the
    next one; if several passes arrive together, the drafted tokens are divided among them.
    """
    texts: list[str] = []
    steps: list[Step] = []
    before = np.zeros(3, int)
    for _, group in itertools.groupby(chunks, lambda chunk: chunk["timings"]["predicted_ms"]):
        for chunk in group:
            total = np.array([int(chunk["timings"].get(name) or 0) for name in TOTALS])
            if new := int(total[0]) - len(texts):
                texts += [""] * (new - 1) + [chunk["choices"][0]["text"]]
        tokens, drafted, accepted = (total - before).tolist()
        for left in range(max(tokens - accepted, min(1, tokens)), 0, -1):  # usually one
            part = drafted // left
            taken = min(part, accepted, tokens)  # fewer tokens where the text ends
            kept = tokens if left == 1 else taken + 1
            steps.append(Step(part, taken, kept))
            tokens, drafted, accepted = tokens - kept, drafted - part, accepted - taken
        before = total
    return texts, steps
