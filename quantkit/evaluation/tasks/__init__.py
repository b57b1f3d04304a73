"""Tasks of lm-evaluation-harness on streamed models: any layout, in constant memory. The extra `tasks`.

`cloze` comes with quantkit and needs no network: predict the last word of a passage of the held-out text, as
in LAMBADA. All other names are the harness's own; the harness downloads their data.
"""

from __future__ import annotations

import difflib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from quantkit.errors import NOT_FOUND, UNSUPPORTED, USAGE, QuantkitError, first_line, name_all, require
from quantkit.evaluation.stream import Listener, StreamedModel

CLOZE = "cloze"
BOOTSTRAPS = 1000  # resamplings for the standard errors of metrics that are not means
FEWSHOT_SEED = 1234  # the harness's own default

TaskScores = dict[str, dict[str, dict[str, float | None]]]  # task -> metric -> value, stderr


@dataclass(frozen=True)
class Tasks:
    """Loaded tasks of the harness. limit: maximum number of examples of each; None for all."""

    loaded: dict[str, Any]
    limit: int | None

    @staticmethod
    def prepare(text: str, limit: int | None) -> Tasks:
        """Load a comma-separated list of tasks. Raises QuantkitError if the harness is not installed, or for
        tasks that are unknown, that generate text, or whose data cannot be loaded."""
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        what = "--tasks runs lm-evaluation-harness, which is not installed"
        require(find_spec("lm_eval"), what, "pip install lm-eval", UNSUPPORTED)
        what = f"--task-limit {limit} leaves no example"
        require(limit is None or limit >= 1, what, "choose 1 or more", USAGE)
        with _silence():
            loaded = _load(names)
        writing = [name for name, task in loaded["tasks"].items() if task.OUTPUT_TYPE == "generate_until"]
        what = f"--tasks: {name_all(writing)} let models write text, which a streamed model does not do"
        hint = "choose tasks that compare likelihoods (multiple choice, LAMBADA, perplexities)"
        require(not writing, what, hint, UNSUPPORTED)
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        return Tasks(loaded, limit)

    def measure(self, model: StreamedModel, listen: Listener) -> TaskScores:
        """Run all tasks on a model; return {task: {metric: {value, stderr}}}."""
        from lm_eval.evaluator import evaluate

        from quantkit.evaluation.tasks.harness import HarnessModel

        named = replace(model, name=f"{model.name}, tasks")
        with _silence() as heard:
            results = evaluate(
                HarnessModel(named, heard(listen)),
                self.loaded,
                limit=self.limit,
                bootstrap_iters=BOOTSTRAPS,
                log_samples=False,
            )
        return {name: _scores(row) for name, row in results["results"].items()}

    def record(self) -> dict[str, Any]:
        """Return the settings on which the figures depend besides the model, as JSON."""
        return {"limit": self.limit, "lm_eval": version("lm_eval")}


def _load(names: Sequence[str]) -> dict[str, Any]:
    """Return the harness's tasks with these names and their data. Raises QuantkitError."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    others = [name for name in names if name != CLOZE]
    manager = TaskManager(include_defaults=bool(others))
    available = sorted({CLOZE, *manager.all_tasks})
    unknown = [name for name in others if name not in available]
    if unknown:
        near = difflib.get_close_matches(unknown[0], available, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "lm-eval ls tasks lists them"
        raise QuantkitError(f"--tasks: no task is called {name_all(map(repr, unknown))}", hint, USAGE)
    try:
        return manager.load([cloze() if name == CLOZE else name for name in names])
    except (OSError, ValueError, RuntimeError) as error:  # raised by datasets and the hub
        what = f"--tasks: the data of {','.join(others)} could not be loaded: {first_line(error)}"
        raise QuantkitError(what, f"the data comes from the hub; {CLOZE} needs none", NOT_FOUND) from error


@contextmanager
def _silence() -> Iterator[Any]:
    """Suppress the harness's output; yield a wrapper with which listeners can still print."""
    terminal = sys.stderr

    def heard(listen: Listener) -> Listener:
        def aloud(source: str, done: int, total: int) -> None:
            with redirect_stderr(terminal):
                listen(source, done, total)

        return aloud

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        yield heard


def cloze() -> dict[str, Any]:
    """Return the bundled task as a configuration of the harness: predict the last word of a passage."""
    from datasets import Dataset

    return {
        "task": CLOZE,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(passages())},
        "output_type": "loglikelihood",
        "test_split": "test",
        "doc_to_text": "{{text.rsplit(' ', 1)[0]}}",
        "doc_to_target": "{{' ' + text.rsplit(' ', 1)[1]}}",
        "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
        "metadata": {"version": 1.0},
    }


def passages() -> list[dict[str, str]]:
    """Return the passages of the bundled task, `{"text": …}` each."""
    lines = (Path(__file__).parent / "cloze.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _scores(row: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Turn `{"acc,none": 0.5, "acc_stderr,none": 0.1}` into `{"acc": {"value": 0.5, "stderr": 0.1}}`."""
    scores = {}
    for key, value in sorted(row.items()):
        metric, comma, kind = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)):
            name = metric if kind == "none" else f"{metric} ({kind})"
            error = row.get(f"{metric}_stderr,{kind}")
            numeric = isinstance(error, (int, float))  # the harness writes N/A for an unknown one
            scores[name] = {"value": float(value), "stderr": float(error) if numeric else None}
    return scores
