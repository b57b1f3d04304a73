"""The other questions of `quantkit bench`: attention, batching, and endpoints under load."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from quantkit.cli.progress import listener, uncollected
from quantkit.errors import USAGE, QuantkitError
from quantkit.evaluation.comparison.files import Outputs
from quantkit.serving.bench.panels import Panels
from quantkit.serving.bench.settings import parse_list

WIDE = 10_000  # a file or pipe has no width


# Flags by the questions that heed them; "" is the plain one. What is not here is for all.
HEEDED = {
    **dict.fromkeys(("engine", "decoded", "rounds", "warmup", "quality"), {""}),
    **dict.fromkeys(("repeats", "threads", "dtype", "device", "revision", "offline", "trust_remote_code"),
        {"", "attn", "batching"}),
    **dict.fromkeys(("html", "plot"), {"", "attn", "batching"}),
    "tokens": {"", "attn", "url"},
    "prompt": {"", "attn", "url"},
    "batch": {"", "attn", "batching"},
    "beyond": {"attn"},
    **dict.fromkeys(("trace", "lengths"), {"batching"}),
    **dict.fromkeys(("requests", "rate"), {"batching", "url"}),
    **dict.fromkeys(("concurrency", "served_model", "api_key", "remote"), {"url"}),
}  # fmt: skip


def refuse_others(question: str, typed: Collection[str]) -> None:
    """Raise QuantkitError for a flag that would be ignored. question: attn, batching, url, or empty."""
    for name in typed:
        heeded = HEEDED.get(name, {question})
        if question not in heeded:
            flag = f"--{name.replace('_', '-')}"
            others = " and ".join(f"--{other}" for other in sorted(heeded - {""}))
            if question:
                raise QuantkitError(f"{flag} is not for --{question}", f"leave it out of --{question}", USAGE)
            raise QuantkitError(f"{flag} is for {others}", f"add one, or leave out {flag}", USAGE)


@dataclass(frozen=True)
class Asked:
    """Flags that all questions share. None: nothing was said."""

    models: tuple[str, ...]
    batch: str | None
    prompt: str | None
    tokens: int | None
    repeats: int
    seed: int
    threads: int | None
    dtype: str
    device: str
    revision: str | None
    offline: bool
    trust_remote_code: bool
    outputs: Outputs
    as_json: bool
    quiet: bool

    def one(self, flag: str, text: str | None, default: int) -> int:
        """The only number of a list. Raises QuantkitError for several."""
        numbers = (default,) if text is None else parse_list(flag, text)
        if len(numbers) > 1:
            raise QuantkitError(f"{flag} {text}: one number here", f"choose {flag} {numbers[0]}", USAGE)
        return numbers[0]

    def opened(self) -> tuple[Any, Any, Any]:
        """The checkpoint, precision and device. Raises QuantkitError for more models than one."""
        import torch

        from quantkit.evaluation.generate import shared_dtype
        from quantkit.models.files.open import open_checkpoint
        from quantkit.models.machine.device import choose_device

        if len(self.models) != 1:
            raise QuantkitError("give one model", "this question is asked of one at a time", USAGE)
        if self.threads:
            torch.set_num_threads(self.threads)
        checkpoint = open_checkpoint(self.models[0], self.revision, self.offline, self.trust_remote_code)
        device = choose_device(self.device)
        return checkpoint, shared_dtype(self.dtype, checkpoint, device), device

    def tell(self, record: dict, panels: Panels) -> None:
        """Print and write a result."""
        if self.as_json:
            print(json.dumps(record, indent=2, allow_nan=False))
        else:
            panels.show(console())
        panels.write(self.outputs)


def console() -> Console:
    """On stdout, as wide as that is."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDE)


def attention(asked: Asked, implementations: str, beyond: bool) -> None:
    """Time and memory of each implementation at growing lengths. beyond: those may exceed the context."""
    asked.outputs.check()
    with listener(asked.quiet) as progress:
        with uncollected():
            from quantkit.serving.bench import attention as bench

        settings = bench.Settings(
            implementations=tuple(filter(None, (name.strip() for name in implementations.split(",")))),
            lengths=() if asked.prompt is None else parse_list("--prompt", asked.prompt),
            batch=asked.one("--batch", asked.batch, 1),
            repeats=asked.repeats,
            seed=asked.seed,
            beyond=beyond,
            **({} if asked.tokens is None else {"steps": asked.tokens}),
        )
        settings.check()
        result = bench.measure(*_before(asked, settings), progress)
    asked.tell(bench.record(result), _panels(bench, result, f"Attention of {result.model}"))


def batching(
    asked: Asked, strategies: str, trace: Path | None, requests: int, rate: float, lengths: tuple[str, str]
) -> None:
    """One trace of requests, batched in several ways. lengths: of prompts and of answers, distributions."""
    asked.outputs.check()
    with listener(asked.quiet) as progress:
        with uncollected():
            from quantkit.serving.bench import batching as bench

        settings = bench.Settings(
            strategies=tuple(filter(None, (name.strip() for name in strategies.split(",")))),
            size=asked.one("--batch", asked.batch, 8),
            repeats=asked.repeats,
            seed=asked.seed,
        )
        settings.check()
        checkpoint, dtype, device = asked.opened()
        if trace is not None:
            work = bench.read(trace, checkpoint.context)
        else:
            drawn = (bench.Lengths.parse(text) for text in lengths)
            work = bench.sample(requests, rate, *drawn, checkpoint.context, asked.seed)
        result = bench.measure(checkpoint, work, settings, dtype, device, progress)
    asked.tell(bench.record(result), _panels(bench, result, f"Batching of {result.model}"))


def endpoint(
    asked: Asked, url: str, concurrency: str | None, requests: int | None, rate: float | None, **told: Any
) -> None:
    """An OpenAI endpoint under load. told: name of the model, key, remote."""
    from quantkit.serving.endpoint import load, table

    if asked.models:
        raise QuantkitError("--url measures what is served there", "leave out the models", USAGE)
    users = {} if concurrency is None else {"concurrency": parse_list("--concurrency", concurrency)}
    settings = load.Settings(
        rates=() if rate is None else (rate,),
        requests=requests,
        prompt_tokens=asked.one("--prompt", asked.prompt, 128),
        output_tokens=64 if asked.tokens is None else asked.tokens,
        seed=asked.seed,
        **users,
        **told,
    )
    with listener(asked.quiet) as progress:
        result = load.measure(url, settings, progress)
    if asked.as_json:
        print(json.dumps(result.record(), indent=2, allow_nan=False))
    else:
        table.show(result, console())


def _before(asked: Asked, settings: Any) -> tuple[Any, Any, Any, Any]:
    checkpoint, dtype, device = asked.opened()
    return checkpoint, settings, dtype, device


def _panels(bench: Any, result: Any, title: str) -> Panels:
    return Panels(
        title, lambda canvas: bench.draw(result, canvas), lambda console: bench.show(result, console)
    )
