"""Results in a model card: a table, and the hub's metadata `model-index`."""

import os
from collections.abc import Sequence
from pathlib import Path

from quantkit.errors import USAGE, require
from quantkit.evaluation.comparison.gates import look_up
from quantkit.evaluation.comparison.table import markdown
from quantkit.models.files import card

METRICS = {"perplexity": "ppl.value", "kl_divergence": "kld.mean", "top1_agreement": "top1"}


def check(path: Path, models: Sequence[str]) -> None:
    """Raise QuantkitError unless `path` is one of the models, in a local folder or file, and not the first
    of several, which the others are compared with."""
    same = [path.exists() and Path(name).exists() and os.path.samefile(name, path) for name in models]
    require(any(same), f"--card {path} is not one of the models", f"add {path} to the models", USAGE)
    what = f"--card {path}: the others are compared with this model"
    require(any(same[1:] or same), what, "name a later model of the list", USAGE)


def add(record: dict, output: Path) -> None:
    """Write the results of the model at `output` into its card. Results of an earlier call are replaced."""
    from huggingface_hub.repocard_data import EvalResult, eval_results_to_model_index

    local = [row for row in record["models"] if Path(row["source"]).exists()]
    model = next(row for row in local if os.path.samefile(row["source"], output))
    data = {key: record["data"][key] for key in ("ctx", "stride", "tokens", "sha256")}
    values = {kind: look_up(model["metrics"], path) for kind, path in METRICS.items()}
    results = [
        EvalResult("text-generation", "text", record["data"]["text"], kind, value, dataset_args=data)
        for kind, value in values.items()
        if value is not None
    ]
    head, text = card.read(card.path_of(output))
    head["model-index"] = eval_results_to_model_index(output.name, results)
    table = markdown(record).partition("\n")[2]  # without the heading of `quantkit eval`
    card.write(card.path_of(output), head, card.section(text, "eval", table))
