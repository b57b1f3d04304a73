"""One prompt continued by several checkpoints, one after the other, and their first difference.

Unlike everything else here this holds a whole model in memory, decoded, with a KV cache: transformers' own
`generate` runs it, so its text is what other programs get from the same weights.
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
from quantkit.evaluation.sampling import Sampling, ends_of_text
from quantkit.evaluation.whole_model import load_model
from quantkit.models.files import tokenizing
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.gguf.tokenizer_hash import tokenizer_sha256
from quantkit.models.machine.device import choose_dtype
from quantkit.models.machine.memory import return_freed_pages
from quantkit.text.chat import ChatTemplate, Conversation

SCHEMA = "quantkit.generate/1"
BROKEN = "\ufffd"  # text of tokens that end inside a character


@dataclass(frozen=True, kw_only=True)
class Settings(Sampling):
    """Settings of all models. chat: the prompt is a user's message."""

    prompt: str
    chat: bool = False

    def check(self) -> None:
        """Raise QuantkitError for values that make no sense."""
        super().check()
        require(self.prompt, "the prompt is empty", "give some text with -p", USAGE)


@dataclass(frozen=True)
class Parting:
    """The first token that differs from the first model's, after equal text.

    token: the model's choice, with `probability`; expected: the first model's choice, with
    `probability_there`, and the probability that this model gave. start, end: place of the token in the
    text.
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
    """A continuation. ids: new tokens, the end of text included. probabilities: of each token. compared: with
    the first model, token by token. parting: None where nothing differs, or nothing was compared."""

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
    settings: Settings, dtype: torch.dtype, device: torch.device, made: Sequence[Continuation]
) -> dict:
    """Return the versioned JSON of all continuations."""
    return {
        "schema": SCHEMA,
        "settings": asdict(settings) | {"dtype": str(dtype).removeprefix("torch."), "device": str(device)},
        "models": [asdict(continuation) for continuation in made],
    }


def shared_dtype(requested: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Return one precision for all models: the first model's if the hardware has it."""
    declared = {torch.bfloat16: "BF16", torch.float16: "F16"}.get(checkpoint.config.dtype, "F32")
    return getattr(torch, choose_dtype(requested, declared, device))


def comparable(checkpoints: Sequence[Checkpoint]) -> list[bool]:
    """Return which checkpoints have the first one's tokenizer, so that tokens can be compared."""
    if len(checkpoints) == 1:
        return [True]
    hashes = [tokenizer_sha256(made.tokenizer, made.text_config.vocab_size) for made in checkpoints]
    return [found == hashes[0] for found in hashes]


def warnings(checkpoints: Sequence[Checkpoint], same_tokens: Sequence[bool], settings: Settings) -> list[str]:
    """Return warnings of texts too long or not comparable. same_tokens: the result of `comparable`."""
    found = []
    for checkpoint, same in zip(checkpoints, same_tokens, strict=True):
        length, context = encode(checkpoint, settings).shape[1] + settings.tokens, checkpoint.context
        if context is not None and length > context:
            found.append(f"{checkpoint.source} was made for {context} tokens; prompt and -n make {length}")
        if not same:
            found.append(f"{checkpoint.source} has another tokenizer: its text is not compared")
    return found


def continue_prompt(
    checkpoint: Checkpoint,
    settings: Settings,
    dtype: torch.dtype,
    device: torch.device,
    first: Continuation | None = None,
    same_tokens: bool = True,
    stream: Stream | None = None,
) -> Continuation:
    """Load the model, continue the prompt, free the model. `first`: the continuation to compare with,
    token by token if `same_tokens`.

    Raises QuantkitError when the model does not fit the memory (exit code 5), lacks tensors, or has no
    chat template to put a `chat` prompt into.
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


def encode(checkpoint: Checkpoint, settings: Settings) -> Tensor:
    """Return the prompt's token ids, int64 `[1, tokens]`."""
    tokenizer = checkpoint.tokenizer
    if not settings.chat:
        with tokenizing.explained():
            ids = tokenizer(settings.prompt)["input_ids"]
    else:
        asked = Conversation([{"role": "user", "content": settings.prompt}], "the prompt")
        text = ChatTemplate(tokenizer).render(asked, answer=True)
        ids = tokenizing.encode(tokenizer, text)
    require(ids, f"the prompt has no token in {checkpoint.source}", "give other text with -p", USAGE)
    return torch.tensor([ids])


class _Recorder(transformers.LogitsProcessor):
    """A recorder of the probability of every chosen token, and of the `expected` ones."""

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
        """Note the probability of the last token, which is known when the next is chosen, and at the end."""
        if self._last is None or not ids:
            return
        place = len(self.probabilities)
        self.probabilities.append(self._last[ids[place]].item())
        if place < len(self.expected):
            self.of_expected.append(self._last[self.expected[place]].item())


class Streamer(TextStreamer):
    """A streamer that passes whole words to a function."""

    def __init__(self, tokenizer: Any, stream: Stream):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stream = stream

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """See TextStreamer, which prints here."""
        self._stream(text)


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of new tokens."""
    return tokenizer.decode(ids, skip_special_tokens=True)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first difference of two texts, which may be the end of the shorter; None if
    equal."""
    pairs = enumerate(zip(one, other, strict=False))
    found = next((place for place, (a, b) in pairs if a != b), None)
    return min(len(one), len(other)) if found is None and len(one) != len(other) else found


def parting(
    tokenizer: Any, made: Continuation, first: Continuation, of_expected: Sequence[float]
) -> Parting | None:
    """Return the first difference of `made` from `first`, which continued the same tokens; None if equal."""
    index = first_difference(made.ids, first.ids)
    if index is None or index >= min(len(made.ids), len(first.ids)):  # one that ends says the same so far
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
