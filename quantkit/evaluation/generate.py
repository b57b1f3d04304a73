"""One prompt continued by several checkpoints, one after the other, and their first difference.

transformers' own `generate` runs each model, so other programs get the same text from the same weights. The
whole decoded model and its KV cache are in memory, unlike in `quantkit eval`.
"""

import gc
import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation.streamers import TextStreamer

from quantkit.errors import USAGE, require
from quantkit.evaluation import sampling
from quantkit.evaluation.sampling import ends_of_text, load_model
from quantkit.evaluation.settings import GenerateSettings
from quantkit.models.files import tokenizing
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.gguf.tokenizer_hash import tokenizer_sha256
from quantkit.models.machine.device import choose_dtype
from quantkit.models.machine.memory import return_freed_pages
from quantkit.text.chat import ChatTemplate, Conversation

SCHEMA = "quantkit.generate/1"
BROKEN = "\ufffd"  # text of tokens that end inside a character
Stream = Callable[[str], None]
Continuation = dict[str, Any]  # as JSON, see `continue_prompt`


def record(
    settings: GenerateSettings, dtype: torch.dtype, device: torch.device, models: Sequence[Continuation]
) -> dict[str, Any]:
    """Return the versioned JSON of all continuations."""
    return {
        "schema": SCHEMA,
        "settings": asdict(settings) | {"dtype": str(dtype).removeprefix("torch."), "device": str(device)},
        "models": list(models),
    }


def shared_dtype(requested: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Return one dtype for all models; `auto`: the first model's if the hardware supports it."""
    declared = {torch.bfloat16: "BF16", torch.float16: "F16"}.get(checkpoint.config.dtype, "F32")
    return getattr(torch, choose_dtype(requested, declared, device))


def comparable(
    checkpoints: Sequence[Checkpoint], settings: GenerateSettings, warn: Callable[[str], None]
) -> list[bool]:
    """Return, for each checkpoint, whether its tokenizer equals the first one's; warn of those that differ.
    Raises QuantkitError (exit code 2) if prompt and new tokens exceed the context of a model."""
    for checkpoint in checkpoints:
        prompt, context = encode(checkpoint, settings).shape[1], checkpoint.context or math.inf
        length, room = prompt + settings.tokens, context - prompt
        what = f"{checkpoint.source} was made for {context} tokens; prompt and -n make {length}"
        hint = f"choose at most -n {room}" if room > 0 else "give a shorter prompt"
        require(length <= context, what, hint, USAGE)
    if len(checkpoints) == 1:
        return [True]
    hashes = [tokenizer_sha256(made.tokenizer, made.text_config.vocab_size) for made in checkpoints]
    same = [digest == hashes[0] for digest in hashes]
    for checkpoint, equal in zip(checkpoints, same, strict=True):
        if not equal:
            warn(f"{checkpoint.source} has another tokenizer: its text is not compared")
    return same


def continue_prompt(
    checkpoint: Checkpoint,
    settings: GenerateSettings,
    dtype: torch.dtype,
    device: torch.device,
    first: Continuation | None = None,
    stream: Stream | None = None,
) -> Continuation:
    """Load the model, continue the prompt, free the model. first: continuation by a model with the same
    tokenizer to compare with. stream: receives the text as it is generated.

    Return the continuation as JSON. ids: new tokens, the end of text included. probabilities: of each token.
    stop: `end` or `length`. compared: whether `first` was given. parting: see `parting`. Raises QuantkitError
    if the model does not fit the memory (exit code 5), lacks tensors, or has no chat template for a `chat`
    prompt.
    """
    began = time.monotonic()
    ids, ends = encode(checkpoint, settings), ends_of_text(checkpoint)
    model = load_model(checkpoint, dtype, device, ids.shape[1] + settings.tokens)
    loaded = time.monotonic()
    tokenizer = checkpoint.tokenizer
    recorder = _Recorder(first["ids"] if first else [])
    # Settings recommended by checkpoints are not used: models should differ by their weights alone.
    given = {"logits_processor": [recorder], "streamer": streamer(tokenizer, stream) if stream else None}
    out = sampling.generate(model, ids.to(device), settings, ends, **given)
    new = out[0, ids.shape[1] :].tolist()
    recorder.note(new[-1])
    seconds = time.monotonic() - loaded
    del model
    gc.collect()
    return_freed_pages()
    made = {
        "source": checkpoint.source,
        "prompt_tokens": ids.shape[1],
        "ids": new,
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "probabilities": recorder.probabilities,
        "stop": "length" if len(new) == settings.tokens and new[-1] not in ends else "end",
        "load_seconds": loaded - began,
        "seconds": seconds,
        "compared": first is not None,
    }
    return made | {"parting": parting(tokenizer, made, first, recorder.of_expected) if first else None}


def encode(checkpoint: Checkpoint, settings: GenerateSettings) -> Tensor:
    """Return the prompt's token ids, int64 `[1, tokens]`."""
    tokenizer = checkpoint.tokenizer
    if not settings.chat:
        with tokenizing.explained():
            ids = tokenizer(settings.prompt)["input_ids"]
    else:
        conversation = Conversation([{"role": "user", "content": settings.prompt}], "the prompt")
        text = ChatTemplate(tokenizer).render(conversation, answer=True)
        ids = tokenizing.encode(tokenizer, text)
    require(ids, f"the prompt has no token in {checkpoint.source}", "give other text with -p", USAGE)
    checkpoint.check_ids(ids)
    return torch.tensor([ids])


class _Recorder(transformers.LogitsProcessor):
    """Records the probabilities of the chosen tokens, and those of the tokens `expected` in their place."""

    def __init__(self, expected: Sequence[int]):
        self.expected = expected
        self.probabilities: list[float] = []
        self.of_expected: list[float] = []
        self._next: Tensor | None = None  # probabilities of the token that is chosen next

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._next is not None:
            self.note(int(input_ids[0, -1]))
        self._next = torch.softmax(scores[0].float(), -1)
        return scores

    def note(self, chosen: int) -> None:
        """Record the probability of a chosen token; `generate` ends without a call for the last one."""
        index = len(self.probabilities)
        self.probabilities.append(self._next[chosen].item())
        if index < len(self.expected):
            self.of_expected.append(self._next[self.expected[index]].item())


def streamer(tokenizer: Any, stream: Stream) -> TextStreamer:
    """Return a streamer that passes generated text to a function, in whole words."""
    made = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    made.on_finalized_text = lambda text, stream_end=False: stream(text)  # its own prints the text
    return made


def equal_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal ids at the beginning of both."""
    return sum(takewhile(bool, map(operator.eq, one, other)))


def parting(
    tokenizer: Any, made: Continuation, first: Continuation, of_expected: Sequence[float]
) -> dict[str, Any] | None:
    """Return the first token of `made` that differs from `first` as JSON; None if one is the beginning of the
    other. of_expected: probabilities that this model gave to the first model's tokens.

    index: its position among the new tokens. token, probability: this model's choice. expected: the first
    model's choice, with its probability in the first model (`probability_there`) and in this model
    (`probability_of_expected`). start, end: characters of the token in this model's text.
    """
    ids, others = made["ids"], first["ids"]
    index = equal_beginning(ids, others)
    if index == min(len(ids), len(others)):
        return None
    before = through = tokenizer.decode(ids[:index], skip_special_tokens=True).rstrip(BROKEN)
    for end in range(index + 1, len(ids) + 1):  # a character may take several tokens
        through = tokenizer.decode(ids[:end], skip_special_tokens=True).rstrip(BROKEN)
        if len(through) > len(before):
            break
    return {
        "index": index,
        "token": tokenizer.decode([ids[index]]),
        "probability": made["probabilities"][index],
        "expected": tokenizer.decode([others[index]]),
        "probability_of_expected": of_expected[index],
        "probability_there": first["probabilities"][index],
        "start": len(before),
        "end": len(through),
    }
