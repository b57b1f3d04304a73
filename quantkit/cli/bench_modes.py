"""`quantkit bench --attn` and `--batching`: one checkpoint, run in several ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

    from quantkit.models.checkpoint import Checkpoint

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class Common(NamedTuple):
    """What both take besides their own options, as the command line gives it."""

    models: list[str]
    dtype: Dtype
    device: str
    html: Path | None
    plot: Path | None
    revision: str | None
    offline: bool
    trust_remote_code: bool
    as_json: bool
    quiet: bool


def attention(common: Common, implementations: str, prompt: str | None, **settings: Any) -> None:
    """--attn. implementations, prompt: lists with commas; settings: fields of `attention.Settings`."""
    from quantkit.cli.progress import listener, uncollected

    with listener(common.quiet) as progress:
        with uncollected():
            from quantkit.serving.bench import attention as bench
        lengths = _numbers("--prompt", prompt) if prompt else ()
        asked = bench.Settings(_names(implementations), lengths, **settings)
        asked.check()
        checkpoint, dtype, device = _open(common, "--attn")
        result = bench.measure(checkpoint, asked, dtype, device, progress)
    _finish(bench, result, f"Attention of {checkpoint.source}", common)


def batching(
    common: Common,
    strategies: str,
    trace: Path | None,
    requests: int,
    rate: float,
    prompts: str,
    outputs: str,
    **settings: Any,
) -> None:
    """--batching. prompts, outputs: distributions of lengths; settings: fields of `batching.Settings`."""
    from quantkit.cli.progress import listener, uncollected

    with listener(common.quiet) as progress:
        with uncollected():
            from quantkit.serving.bench import batching as bench
        asked = bench.Settings(_names(strategies), **settings)
        asked.check()
        drawn = bench.Lengths.parse(prompts), bench.Lengths.parse(outputs)
        checkpoint, dtype, device = _open(common, "--batching")
        context = checkpoint.context
        made = (
            bench.sample(requests, rate, *drawn, context, asked.seed)
            if trace is None
            else bench.read(trace, context)
        )
        result = bench.measure(checkpoint, made, asked, dtype, device, progress)
    _finish(bench, result, f"Batching with {checkpoint.source}", common)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    from quantkit.errors import USAGE, QuantkitError

    parts = _names(text)
    if not parts or not all(part.isascii() and part.isdigit() and len(part) < 8 for part in parts):
        hint = f"separate them by commas: {flag} 128,512"
        raise QuantkitError(f"{flag} {text!r} is no list of numbers", hint, USAGE)
    return tuple(int(part) for part in parts)


def _open(common: Common, flag: str) -> tuple[Checkpoint, torch.dtype, torch.device]:
    """The one checkpoint, and what it is computed in; places for files are looked at first."""
    from quantkit.errors import USAGE, QuantkitError
    from quantkit.evaluation.comparison.files import Outputs
    from quantkit.evaluation.generate import shared_dtype
    from quantkit.models.device import choose_device
    from quantkit.models.open import open_checkpoint

    if len(common.models) != 1:
        raise QuantkitError(f"{flag} takes one model, not {len(common.models)}", "one run each", USAGE)
    Outputs(common.html, common.plot).check()
    model = common.models[0]
    checkpoint = open_checkpoint(model, common.revision, common.offline, common.trust_remote_code)
    device = choose_device(common.device)
    return checkpoint, shared_dtype(common.dtype, checkpoint, device), device


def _finish(bench: Any, result: Any, title: str, common: Common) -> None:
    """JSON or tables on stdout, and the files."""
    from rich.console import Console

    if common.html or common.plot:
        from quantkit.serving.bench import pictures

        if common.plot:
            pictures.save(bench.draw, result, common.plot)
        if common.html:
            page = pictures.page(title, bench.show, bench.draw, result)
            common.html.write_text(page, encoding="utf-8")
    if common.as_json:
        print(json.dumps(bench.record(result), indent=2, allow_nan=False))
    else:
        bench.show(result, Console(highlight=False))
