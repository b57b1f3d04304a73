"""`quantkit bench`: the cost of running checkpoints; attention, batching, and endpoints under load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from quantkit.cli import flags
from quantkit.errors import USAGE, QuantkitError
from quantkit.serving.bench.settings import ATTN, BATCHING, MODELS, URL, Settings

EPILOG = """Examples:

  quantkit bench ./model ./model-nf4 ./model-Q4_K_M.gguf

  quantkit bench ./model ./model-nf4 --batch 1,4,16 --prompt 128,512 --tokens 64

  quantkit bench ./model ./model-nf4 --quality result.json     (of quantkit eval … --json > result.json)

  quantkit bench ./model --batch 1,2,4,8,16,32 --plot roofline.svg     (the roofline over it)

  quantkit bench ./model.gguf --engine llama.cpp,transformers --json

  quantkit bench ./model --attn eager,sdpa --prompt 256,1024,4096     (time and memory of attention)

  quantkit bench ./model --batching static,dynamic,continuous --requests 64 --rate 4

  quantkit bench --url http://127.0.0.1:8000     (a server under load, this machine's)"""
PANELS = {
    "points": ("batch", "prompt", "tokens", "repeats", "rounds", "warmup", "seed"),
    "engine": ("engine", "decoded", "threads", "dtype", "device"),
    "options": ("quality",),
    "other modes": (
        "attn", "batching", "url", "concurrency", "requests", "rate", "served_model", "api_key",
        "remote",
    ),
}  # fmt: skip
ARGUMENT = Annotated[
    list[str] | None,
    typer.Argument(help="Folders, GGUF files or hub ids; the others are compared to the first."),
]


def _invoke(context: typer.Context, **values: Any) -> None:
    """Run `quantkit bench`."""
    from quantkit.cli.progress import listener
    from quantkit.evaluation.comparison.files import Outputs

    settings, models = flags.options(Settings, values).resolve(), values["models"] or ()
    _check_models(settings.mode, models)
    outputs = Outputs(values["html"], values["plot"])
    if settings.mode == URL and (outputs.html or outputs.plot):
        raise QuantkitError("--html and --plot are not for --url", "leave them out", USAGE)
    outputs.check()
    with listener(values["quiet"]) as progress:
        result, report = MEASURES[settings.mode](models, settings, values, progress)
    if not values["as_json"]:
        report.show()
    if settings.mode == MODELS:
        from quantkit.serving.bench import measure

        measure.refuse_empty(result)  # with --json the record goes with the error
    if values["as_json"]:
        print(json.dumps(result, indent=2, allow_nan=False))
    outputs.write(report.figures, report.page)


def _check_models(mode: str, models: Sequence[str]) -> None:
    """Raise QuantkitError for too many models, or too few."""
    if mode == URL and models:
        raise QuantkitError("--url measures the model that is served there", "leave out the models", USAGE)
    if mode != URL and not models:
        raise QuantkitError("give a model", "for example: quantkit bench ./model ./model-nf4", USAGE)
    if mode in (ATTN, BATCHING) and len(models) > 1:
        raise QuantkitError("give one model", f"--{mode} measures one at a time", USAGE)


def _models(models: Sequence[str], settings: Settings, values: dict, progress: Any) -> tuple[dict, Any]:
    """Measure checkpoints side by side."""
    from quantkit.serving.bench import measure, record, show

    evaluated = record.read_quality(settings.quality)
    rows = measure.rows(models, settings, values["revision"], values["offline"])
    measure.measure(rows, settings, progress)
    result = record.record(rows, settings, evaluated)
    return result, show.report(result, values["quiet"])


def _one(models: Sequence[str], settings: Settings, values: dict, progress: Any) -> tuple[dict, Any]:
    """Measure attention implementations or ways of batching of one model."""
    from quantkit.cli.progress import uncollected

    with uncollected():
        import torch

        from quantkit.evaluation.generate import shared_dtype
        from quantkit.models.files.open import open_checkpoint
        from quantkit.models.machine.device import choose_device

        room = f"quantkit.serving.bench.{'attention' if settings.mode == ATTN else 'batching'}"
        measure, show = (import_module(f"{room}.{name}") for name in ("measure", "show"))

    torch.set_num_threads(settings.cores)
    trusted = values["offline"], values["trust_remote_code"]
    checkpoint = open_checkpoint(models[0], values["revision"], *trusted)
    device = choose_device(settings.device)
    dtype = shared_dtype(settings.dtype, checkpoint, device)
    result = measure.measure(checkpoint, settings, dtype, device, progress)
    return result, show.report(result)


def _endpoint(models: Sequence[str], settings: Settings, values: dict, progress: Any) -> tuple[dict, Any]:
    """Measure an OpenAI endpoint under load."""
    from quantkit.serving.endpoint import load, show

    given = {
        "concurrency": settings.numbers("concurrency") if settings.concurrency else None,
        "requests": settings.requests,
        "prompt_words": settings.number("prompt"),
        "output_tokens": settings.tokens,
        "seed": settings.seed,
        "model": settings.served_model,
        "api_key": settings.api_key,
        "remote": settings.remote,
    }
    asked = load.Settings(**{name: value for name, value in given.items() if value is not None})
    result = load.measure(settings.url, asked, progress)
    return result, show.report(result)


MEASURES = {MODELS: _models, ATTN: _one, BATCHING: _one, URL: _endpoint}


command = flags.sign(
    _invoke,
    [
        flags.parameter("models", ARGUMENT, None),
        *(row for panel, names in PANELS.items() for row in flags.of(panel, Settings, names)),
        flags.parameter("html", flags.HTML, None),
        flags.parameter("plot", flags.PLOT, None),
        flags.parameter("revision", flags.FIRST_REVISION, None),
        *flags.fixed(("offline", "trust_remote_code", "as_json", "quiet")),
    ],
)
