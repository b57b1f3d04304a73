"""Measure tokens per second, latency and memory of checkpoints, by engine.

Examples:
  quantkit bench ./model ./model-nf4 ./model-Q4_K_M.gguf
  quantkit bench ./model ./model-nf4 --batch 1,4,16 --prompt-tokens 128,512 --tokens 64
  quantkit bench ./model ./model-nf4 --quality result.json     # of quantkit eval … --json > result.json
  quantkit bench ./model --batch 1,2,4,8,16,32 --plot batches.svg
  quantkit bench ./model.gguf --engine llama.cpp,transformers --json
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from typing import Any

from quantkit.cli import flags, streams
from quantkit.serving.bench.settings import AttentionSettings, BatchingSettings, BenchSettings, CommonSettings

EXAMPLES = {
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
MODELS = flags.argument(
    "Folders, GGUF files or hub ids; the others are compared with the first. A folder with the name of a "
    "subcommand is written ./NAME.",
    list[str],
)
Measured = tuple[dict, Any]  # result and report


def _command(
    measure: Callable[..., Measured], kind: type[CommonSettings], argument: Parameter
) -> Callable[..., None]:
    """Return the function that runs a command. measure: runs the benchmark. kind: its settings."""

    @flags.command(
        argument,
        *flags.by_panel(PANELS, kind),
        shared=("html", "plot", *flags.OPENING),
        helps=flags.FIRST_REVISION if kind is BenchSettings else None,
    )
    def invoke(**values: Any) -> None:
        from quantkit.evaluation.comparison.report import Outputs
        from quantkit.serving.bench.measure import refuse_empty

        settings, as_json, quiet = flags.options(kind, values), values["as_json"], values["quiet"]
        settings.check()
        outputs = Outputs(values["html"], values["plot"])
        outputs.check()
        with streams.listener(quiet, computes=kind is not BenchSettings) as progress:
            result, report = measure(settings, values, progress)
        refuse = partial(refuse_empty, result)
        streams.present(result, as_json, report.show, refuse, allow_nan=False)
        outputs.write(report, as_json=as_json, quiet=quiet)

    return invoke


def _models(settings: BenchSettings, values: dict, progress: Any) -> Measured:
    from quantkit.evaluation.comparison.record import merge, read
    from quantkit.serving.bench import measure, record, show

    evaluated = merge([read(Path(path)) for path in settings.quality]) if settings.quality else None
    models = measure.open_models(values["models"], settings, values["revision"], values["offline"])
    measure.measure(models, settings, progress)
    result = record.record(models, settings, evaluated)
    return result, show.report(result, values["quiet"])


def _one(settings: AttentionSettings | BatchingSettings, values: dict, progress: Any) -> Measured:
    """Measure attention implementations or batching strategies of one model."""
    from quantkit.models.files.open import open_checkpoint

    folder = "attention" if isinstance(settings, AttentionSettings) else "batching"
    measure, show = (import_module(f"quantkit.serving.bench.{folder}.{name}") for name in ("measure", "show"))

    trusted = values["offline"], values["trust_remote_code"]
    checkpoint = open_checkpoint(values["model"], values["revision"], *trusted)
    result = measure.measure(checkpoint, settings, progress)
    return result, show.report(result)


command = _command(_models, BenchSettings, flags.parameter("models", MODELS))
attention = _command(_one, AttentionSettings, flags.parameter("model", flags.MODEL))
batching = _command(_one, BatchingSettings, flags.parameter("model", flags.MODEL))
