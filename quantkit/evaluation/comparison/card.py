"""Results in a model card: a table, and the hub's metadata `model-index`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from quantkit.errors import USAGE, require
from quantkit.evaluation.comparison.gates import look_up
from quantkit.evaluation.comparison.table import markdown
from quantkit.models.files import card

METRICS = {  # type -> name, path in the record of a model
    "perplexity": ("Perplexity", "metrics.ppl.value"),
    "kl_divergence": ("KL divergence from the original, nats per token", "metrics.kld.mean"),
    "top1_agreement": ("Top-1 agreement with the original", "metrics.top1"),
}


def check(place: Path, models: Sequence[str]) -> None:
    """Raise QuantkitError unless `place` is one of the models, in a local folder or file."""
    hint = f"add it: quantkit eval {' '.join(models)} {place} --card {place}"
    there = any(Path(model).exists() and os.path.samefile(model, place) for model in models if place.exists())
    require(there, f"--card {place} is not one of the models", hint, USAGE)


def add(record: dict, place: Path) -> None:
    """Write the results of the model at `place` into its card. Results of an earlier call are replaced."""
    from huggingface_hub.repocard_data import EvalResult, eval_results_to_model_index

    path, made = card.path_of(place), []
    own = [row for row in record["models"] if Path(row["source"]).exists()]
    model = next(row for row in own if os.path.samefile(row["source"], place))
    data = record["data"]
    about = {
        "context": data["ctx"],
        "stride": data["stride"],
        "tokens": data["tokens"],
        "sha256": data["sha256"],
    }
    for kind, name, value, dataset in _values(model, data["text"]):
        args = about if dataset == data["text"] else None
        made.append(
            EvalResult("text-generation", "text", dataset, kind, value, metric_name=name, dataset_args=args)
        )
    head, text = card.read(path)
    head["model-index"] = eval_results_to_model_index(place.name, made)
    table = markdown(record).partition("\n")[2]  # without the heading of `quantkit eval`
    card.write(path, head, card.section(text, "eval", table))


def _values(model: dict, text: str) -> Iterator[tuple[str, str, float, str]]:
    """Yield type, name and value of each metric, and the text or task that it was measured on."""
    for kind, (name, path) in METRICS.items():
        if (value := look_up(model, path)) is not None:
            yield kind, name, value, text
    for task, metrics in (model["tasks"] or {}).items():
        yield from ((metric, metric, found["value"], task) for metric, found in metrics.items())
