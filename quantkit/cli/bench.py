"""`quantkit bench`: the cost of running checkpoints, and its subcommands attention and batching."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from inspect import Parameter
from typing import Annotated, Any

import typer

from quantkit.cli import flags
from quantkit.serving.bench.settings import (
    AttentionSettings,
    BatchingSettings,
    BenchSettings,
    CommonSettings,
)

EPILOG = """Examples:
  quantkit bench ./model ./model-nf4 ./model-Q4_K_M.gguf
  quantkit bench ./model ./model-nf4 --batch 1,4,16 --prompt-tokens 128,512 --tokens 64
  quantkit bench ./model ./model-nf4 --quality result.json     (of quantkit eval … --json > result.json)
  quantkit bench ./model --batch 1,2,4,8,16,32 --plot batches.svg
  quantkit bench ./model.gguf --engine llama.cpp,transformers --json"""
EPILOGS = {
    "attention": """Examples:
  quantkit bench attention ./model
  quantkit bench attention ./model --implementations eager,sdpa --prompt-tokens 256,1024,4096""",
    "batching": """Examples:
  quantkit bench batching ./model
  quantkit bench batching ./model --policies static,continuous --requests 64 --rate 4""",
}
PANELS = {  # panels of the help; each command shows those it has
    "options": ("implementations", "policies", "requests", "rate", "quality"),
    "runs": ("batch", "prompt_tokens", "tokens", "repeats", "rounds", "warmup", "seed"),
    "engine": ("engine", "decoded", "threads", "dtype", "device"),
}
MODELS = Annotated[
    list[str],
    typer.Argument(
        help="Folders, GGUF files or hub ids; the others are compared with the first. A folder with the name "
        "of a subcommand is written ./NAME."
    ),
]
MODEL = Annotated[str, typer.Argument(help="Checkpoint folder, GGUF file or hub id.")]
FILES = [
    flags.parameter("html", flags.HTML, None),
    flags.parameter("plot", flags.PLOT, None),
    flags.parameter("revision", flags.FIRST_REVISION, None),
    *flags.fixed(("offline", "trust_remote_code", "as_json", "quiet")),
]


def _command(
    measure: Callable[..., tuple[dict, Any]], kind: type[CommonSettings], argument: Parameter
) -> Callable[..., None]:
    """Return the function that runs a command. measure: returns result and report. kind: its settings."""

    def invoke(context: typer.Context, **values: Any) -> None:
        from quantkit.cli.progress import listener
        from quantkit.evaluation.comparison.report import Outputs

        settings = flags.options(kind, values)
        settings.check()
        outputs = Outputs(values["html"], values["plot"])
        outputs.check()
        with listener(values["quiet"]) as progress:
            result, report = measure(settings, values, progress)
        if not values["as_json"]:
            report.show()
        if kind is BenchSettings:
            from quantkit.serving.bench import measure as of_models

            of_models.refuse_empty(result)  # with --json the record goes with the error
        if values["as_json"]:
            print(json.dumps(result, indent=2, allow_nan=False))
        outputs.write(report, as_json=values["as_json"], quiet=values["quiet"])

    fields = kind.__dataclass_fields__.keys()
    panels = {panel: [name for name in names if name in fields] for panel, names in PANELS.items()}
    rows = [row for panel, names in panels.items() if names for row in flags.of(panel, kind, names)]
    return flags.sign(invoke, [argument, *rows, *FILES])


def _models(settings: BenchSettings, values: dict, progress: Any) -> tuple[dict, Any]:
    """Measure several checkpoints; return result and report."""
    from quantkit.serving.bench import measure, record, show

    evaluated = record.read_quality(settings.quality)
    rows = measure.rows(values["models"], settings, values["revision"], values["offline"])
    measure.measure(rows, settings, progress)
    result = record.record(rows, settings, evaluated)
    return result, show.report(result, values["quiet"])


def _one(settings: AttentionSettings | BatchingSettings, values: dict, progress: Any) -> tuple[dict, Any]:
    """Measure attention implementations or batching strategies of one model; return result and report."""
    from quantkit.cli.progress import uncollected

    with uncollected():
        import torch

        from quantkit.evaluation.generate import shared_dtype
        from quantkit.models.files.open import open_checkpoint
        from quantkit.models.machine.device import choose_device

        folder = "attention" if isinstance(settings, AttentionSettings) else "batching"
        measure, show = (
            import_module(f"quantkit.serving.bench.{folder}.{name}") for name in ("measure", "show")
        )

    torch.set_num_threads(settings.cores)
    trusted = values["offline"], values["trust_remote_code"]
    checkpoint = open_checkpoint(values["model"], values["revision"], *trusted)
    device = choose_device(settings.device)
    dtype = shared_dtype(settings.dtype, checkpoint, device)
    result = measure.measure(checkpoint, settings, dtype, device, progress)
    return result, show.report(result)


command = _command(_models, BenchSettings, flags.parameter("models", MODELS))
attention = _command(_one, AttentionSettings, flags.parameter("model", MODEL))
batching = _command(_one, BatchingSettings, flags.parameter("model", MODEL))
