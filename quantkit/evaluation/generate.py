"""One prompt continued by several checkpoints, one after the other, and their first difference.

transformers' own `generate` runs each model, so other programs get the same text from the same weights. The
whole decoded model and its KV cache are in memory, unlike in `quantkit eval`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation.streamers import TextStreamer

from quantkit.errors import USAGE, require
from quantkit.evaluation import sampling
from quantkit.evaluation.sampling import ends_of_text
from quantkit.evaluation.settings import GenerateSettings
from quantkit.evaluation.whole_model import load_model
from quantkit.models.files import tokenizing
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.gguf.tokenizer_hash import tokenizer_sha256
from quantkit.models.machine.device import choose_dtype
from quantkit.models.machine.memory import return_freed_pages
from quantkit.text.chat import ChatTemplate, Conversation

SCHEMA = "quantkit.generate/1"
BROKEN = "\ufffd"  # text of tokens that end inside a character


@dataclass(frozen=True)
class Parting:
    """The first token that differs from the first model's text.

    index: its position among the new tokens. token, probability: this model's choice. expected: the first
    model's choice, with its probability in the first model (`probability_there`) and in this model
    (`probability_of_expected`). start, end: characters of the token in this model's text.
    """

    index: int
    token: str
    probability: float
    expected: str
    probability_of_expected: float
    probability_there: float
    start: int
    end: int


@dataclass(frozen=True)
class Continuation:
    """A continuation. ids: new tokens, the end of text included. probabilities: of each token. stop: `end` or
    `length`. compared: whether it was compared with the first model's. parting: None without a difference."""

    source: str
    prompt_tokens: int
    ids: list[int]
    text: str
    probabilities: list[float]
    stop: str  # "end" or "length"
    load_seconds: float
    seconds: float
    compared: bool = False
    parting: Parting | None = None


Stream = Callable[[str], None]


def record(
    settings: GenerateSettings, dtype: torch.dtype, device: torch.device, made: Sequence[Continuation]
) -> dict:
    """Return the versioned JSON of all continuations."""
    return {
        "schema": SCHEMA,
        "settings": asdict(settings) | {"dtype": str(dtype).removeprefix("torch."), "device": str(device)},
        "models": [asdict(continuation) for continuation in made],
    }


def shared_dtype(requested: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Return one dtype for all models; `auto`: the first model's if the hardware supports it."""
    declared = {torch.bfloat16: "BF16", torch.float16: "F16"}.get(checkpoint.config.dtype, "F32")
    return getattr(torch, choose_dtype(requested, declared, device))


def comparable(checkpoints: Sequence[Checkpoint]) -> list[bool]:
    """Return, for each checkpoint, whether its tokenizer equals the first one's."""
    if len(checkpoints) == 1:
        return [True]
    hashes = [tokenizer_sha256(made.tokenizer, made.text_config.vocab_size) for made in checkpoints]
    return [digest == hashes[0] for digest in hashes]


def warnings(
    checkpoints: Sequence[Checkpoint], same_tokens: Sequence[bool], settings: GenerateSettings
) -> list[str]:
    """Return warnings: context too short, or other tokenizer. same_tokens: result of `comparable`."""
    texts = []
    for checkpoint, same in zip(checkpoints, same_tokens, strict=True):
        length, context = encode(checkpoint, settings).shape[1] + settings.tokens, checkpoint.context
        if context is not None and length > context:
            texts.append(f"{checkpoint.source} was made for {context} tokens; prompt and -n make {length}")
        if not same:
            texts.append(f"{checkpoint.source} has another tokenizer: its text is not compared")
    return texts


def continue_prompt(
    checkpoint: Checkpoint,
    settings: GenerateSettings,
    dtype: torch.dtype,
    device: torch.device,
    first: Continuation | None = None,
    same_tokens: bool = True,
    stream: Stream | None = None,
) -> Continuation:
    """Load the model, continue the prompt, free the model. first: continuation to compare with, if
    `same_tokens`. stream: receives the text as it is generated.

    Raises QuantkitError if the model does not fit the memory (exit code 5), lacks tensors, or has no
    chat template for a `chat` prompt.
    """
    began = time.monotonic()
    ids, ends = encode(checkpoint, settings), ends_of_text(checkpoint)
    model = load_model(checkpoint, dtype, device, ids.shape[1] + settings.tokens)
    loaded = time.monotonic()
    tokenizer = checkpoint.tokenizer
    recorder = _Recorder(ids.shape[1], first.ids if first and same_tokens else [])
    # Settings recommended by checkpoints are not used: models should differ by their weights alone.
    streamer = Streamer(tokenizer, stream) if stream else None
    given = ids.to(device)
    out = sampling.generate(model, given, settings, ends, logits_processor=[recorder], streamer=streamer)
    new = out[0, ids.shape[1] :].tolist()
    recorder.note(new)
    seconds = time.monotonic() - loaded
    del model
    gc.collect()
    return_freed_pages()
    made = Continuation(
        source=checkpoint.source,
        prompt_tokens=ids.shape[1],
        ids=new,
        text=decode(tokenizer, new),
        probabilities=recorder.probabilities,
        stop="length" if len(new) == settings.tokens and new[-1] not in ends else "end",
        load_seconds=loaded - began,
        seconds=seconds,
    )
    if first is None or not same_tokens:
        return made
    return replace(made, compared=True, parting=parting(tokenizer, made, first, recorder.of_expected))


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

    def __init__(self, prompt_tokens: int, expected: Sequence[int]):
        self.prompt_tokens = prompt_tokens
        self.expected = expected
        self.probabilities: list[float] = []
        self.of_expected: list[float] = []
        self._last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.note(input_ids[0, self.prompt_tokens :].tolist())
        self._last = torch.softmax(scores[0].float(), -1)
        return scores

    def note(self, ids: list[int]) -> None:
        """Record the probability of the last chosen token. Call before the next is chosen, and at the end."""
        if self._last is None or not ids:
            return
        index = len(self.probabilities)
        self.probabilities.append(self._last[ids[index]].item())
        if index < len(self.expected):
            self.of_expected.append(self._last[self.expected[index]].item())


class Streamer(TextStreamer):
    """Passes generated text to a function, in whole words."""

    def __init__(self, tokenizer: Any, stream: Stream):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stream = stream

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass the text on; TextStreamer prints it."""
        self._stream(text)


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of token ids, without special tokens."""
    return tokenizer.decode(ids, skip_special_tokens=True)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first difference; the length of the shorter if it is the other's beginning;
    None if both are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    index = next((position for position, (a, b) in pairs if a != b), None)
    return min(len(one), len(other)) if index is None and len(one) != len(other) else index


def parting(
    tokenizer: Any, made: Continuation, first: Continuation, of_expected: Sequence[float]
) -> Parting | None:
    """Return the first difference of `made` from `first`; None if one is the beginning of the other.
    of_expected: probabilities that this model gave to the first model's tokens."""
    index = first_difference(made.ids, first.ids)
    if index is None or index >= min(len(made.ids), len(first.ids)):  # one text is the beginning of the other
        return None
    before = through = decode(tokenizer, made.ids[:index]).rstrip(BROKEN)
    for end in range(index + 1, len(made.ids) + 1):  # a character may take several tokens
        through = decode(tokenizer, made.ids[:end]).rstrip(BROKEN)
        if len(through) > len(before):
            break
    return Parting(
        index=index,
        token=tokenizer.decode([made.ids[index]]),
        probability=made.probabilities[index],
        expected=tokenizer.decode([first.ids[index]]),
        probability_of_expected=of_expected[index],
        probability_there=first.probabilities[index],
        start=len(before),
        end=len(through),
    )
