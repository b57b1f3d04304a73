"""transformers' assisted generation, with every step recorded: drafted tokens, kept tokens, seconds.

A hook on the target's forward pass records the tokens to check; a streamer records the kept ones. k is
constant here; by default transformers adapts k and drafts fewer tokens if the draft model is unsure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

from quantkit.evaluation import sampling
from quantkit.evaluation.generate import equal_beginning
from quantkit.evaluation.sampling import Sampling
from quantkit.serving.engines.transformers import device_time
from quantkit.serving.specdec.acceptance_rate import DraftStep

LOOKUP_NGRAM = 2  # length of the n-grams that prompt-lookup looks up, transformers' default


@dataclass(frozen=True)
class DraftedText:
    """One generated text. ids: its new tokens' ids. steps: the target's passes. seconds: time of the whole
    call. decode_seconds: time after the first pass, of which drafting: seconds between passes of the target;
    checking: seconds from a pass's start until its tokens are chosen."""

    ids: list[int]
    steps: list[DraftStep]
    seconds: float
    decode_seconds: float
    drafting: float
    checking: float

    @property
    def tokens(self) -> int:
        """Number of new tokens."""
        return len(self.ids)

    @property
    def decoded(self) -> int:
        """Number of new tokens after those of the first pass."""
        return len(self.ids) - self.steps[0].tokens


def generate(
    target: nn.Module,
    prompt: Tensor,
    how: Sampling,
    ends: list[int],
    k: int = 0,
    draft: nn.Module | None = None,
) -> DraftedText:
    """Continue a prompt, int64 `[1, tokens]`, drafting k tokens per pass; k = 0: the target alone. draft: the
    draft model; None: prompt-lookup, which copies from the text so far. ends: ids that end a text."""
    config, assistant = {}, {}
    if k and draft is None:
        config = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": LOOKUP_NGRAM}
    elif k:
        assistant = {"assistant_model": draft}
        draft.generation_config = transformers.GenerationConfig(
            num_assistant_tokens=k,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
    target.generation_config = transformers.GenerationConfig()  # not the checkpoint's settings
    recorder = _PassRecorder(prompt.device)
    hook = target.register_forward_pre_hook(recorder.begin, with_kwargs=True)
    began = device_time(prompt.device)
    try:
        out = sampling.generate(target, prompt, how, ends, config, streamer=recorder, **assistant)
        seconds = device_time(prompt.device) - began
    finally:
        hook.remove()
    begun, (_, *chosen) = recorder.begun, recorder.chosen
    read, steps = prompt.shape[1], []  # ids before the drafted ones: the first pass also reads the prompt
    for (given, _), (kept, _) in zip(begun, chosen, strict=True):
        drafted, read = given[read:], 1
        steps.append(DraftStep(len(drafted), equal_beginning(drafted, kept), len(kept)))
    made = DraftedText(
        ids=out[0, prompt.shape[1] :].tolist(),
        steps=steps,
        seconds=seconds,
        decode_seconds=chosen[-1][1] - chosen[0][1],
        drafting=sum(start - end for (_, start), (_, end) in zip(begun[1:], chosen, strict=False)),
        checking=sum(end - start for (_, start), (_, end) in zip(begun[1:], chosen[1:], strict=True)),
    )
    assert sum(step.tokens for step in steps) == len(made.ids)
    return made


class _PassRecorder(BaseStreamer):
    """Records (ids, time) of each pass of the target: `begun` its input, `chosen` the tokens that are kept.
    The first entry of `chosen` is the prompt."""

    def __init__(self, device: torch.device):
        self.device = device
        self.begun: list[tuple[list[int], float]] = []
        self.chosen: list[tuple[list[int], float]] = []

    def begin(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Record the input of a pass; a forward pre-hook."""
        self.begun.append((kwargs["input_ids"][0].tolist(), device_time(self.device)))

    def put(self, value: Tensor) -> None:
        """Record the tokens of a pass. transformers calls this with the prompt first."""
        self.chosen.append((value.flatten().tolist(), device_time(self.device)))

    def end(self) -> None:
        """Do nothing; transformers calls this when the text has ended."""


@torch.no_grad()
def parting(
    target: nn.Module, prompt: Tensor, alone_ids: Sequence[int], drafted_ids: Sequence[int]
) -> dict[str, Any] | None:
    """Return the first difference between a drafted greedy text and the target's own, or None.

    A pass over several tokens rounds differently than passes over single tokens. So two texts may differ
    where two tokens have nearly equal logits. The difference of these logits is compared with the change that
    the length of a pass causes in the target's logits.

    prompt: int64 `[1, tokens]`. alone_ids, drafted_ids: new tokens of the target alone and with the draft.
    index: position of the first difference. token, expected: ids at this position with the draft and alone;
    None if one text ends there. margin: logit of `expected` minus logit of `token`, computed token by token.
    noise: largest difference of the target's logits at this position between token by token and one pass.
    tie: margin <= 2 · noise.
    """
    index = equal_beginning(alone_ids, drafted_ids)
    if index == max(len(alone_ids), len(drafted_ids)):
        return None
    position = min(index, len(alone_ids) - 1)
    options = {"output_logits": True, "return_dict_in_generate": True}
    made = sampling.generate(target, prompt, Sampling(position + 1), [], options)
    single = made.logits[position][0].to("cpu").float()
    whole = torch.cat([prompt, torch.tensor([list(alone_ids)], device=prompt.device)], 1)
    at_once = target(input_ids=whole, use_cache=False).logits[0, prompt.shape[1] - 1 + position]
    noise = (at_once.to("cpu").float() - single).abs().max().item()
    ended = index >= min(len(alone_ids), len(drafted_ids))  # rounding cannot explain that
    token, expected = (None, None) if ended else (drafted_ids[index], alone_ids[index])
    margin = None if ended else (single[expected] - single[token]).item()
    tie = margin is not None and margin <= 2 * noise
    return {
        "index": index, "noise": noise, "token": token, "expected": expected, "margin": margin, "tie": tie,
    }  # fmt: skip
