"""The Python API: what the commands do, as functions that return what `--json` prints. See docs/python.md.

The functions print nothing and raise QuantkitError. They import what they need when they are called.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import QuantkitError as QuantkitError
from quantkit.quantize.progress import Progress as Progress

if TYPE_CHECKING:
    from quantkit.evaluation.of_job import Result as Result

Place = str | os.PathLike[str]  # a folder, a GGUF file or a hub id


@dataclass(frozen=True)
class Evaluation:
    """A comparison of checkpoints. record: the JSON of `quantkit eval`. Notebooks show it as a table."""

    record: dict[str, Any]

    @property
    def models(self) -> list[dict[str, Any]]:
        """One record for each model: `source`, `size`, `metrics`, and `tasks` if they were run."""
        return self.record["models"]

    @property
    def passed(self) -> bool:
        """True if every gate passed."""
        return all(gate["pass"] for gate in self.record["gates"])

    def __str__(self) -> str:
        from quantkit.evaluation.comparison.table import markdown

        return markdown(self.record)

    _repr_markdown_ = __str__


def quantize(
    method: str,
    model: Place,
    *,
    output: Place | None = None,
    evaluate_on: Place | None = None,
    resume: bool = False,
    overwrite: bool = False,
    revision: str | None = None,
    offline: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | bool = False,
    **options: Any,
) -> Result:
    """Quantize a checkpoint and return what was written. The job of `quantkit METHOD`.

    options: by the names of the flags, such as bits=4, calibration="text.txt" or exclude=["lm_head"].
    evaluate_on: text on which original and output are compared. progress: True shows a bar; a `Progress`
    hears every step. An interrupted job keeps its finished blocks: call again with resume=True.
    """
    from quantkit.quantize.prepare import recipe

    given = {"model": os.fspath(model)} | ({"output": os.fspath(output)} if output is not None else {})
    choice = recipe.merge(recipe.of_options(method, options | given), (), {})
    with _listening(progress) as listener:
        from quantkit.evaluation import of_job, windows
        from quantkit.quantize import several

        outputs, jobs = several.prepare(
            choice, listener, resume=resume, overwrite=overwrite, revision=revision, offline=offline,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        if not jobs:
            return of_job.Result(outputs, [])
        text = windows.load(jobs[0].checkpoint, evaluate_on, None, None, None) if evaluate_on else None
        return of_job.run(jobs, text, listener)


def evaluate(
    models: Place | Sequence[Place],
    text: Place | None = None,
    *,
    card: Place | None = None,
    revision: str | None = None,
    offline: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | bool = False,
    **options: Any,
) -> Evaluation:
    """Compare checkpoints with the first: perplexity, KL divergence, tasks. `quantkit eval`.

    text: a file, or a dataset such as wikitext2; None: the shipped held-out text. options: by the names of
    the flags, such as ctx=512, and trials=["nf4"] for `--as nf4`. card: the model whose README.md gets its
    results. A failed gate is no error: see `passed`.
    """
    from quantkit.evaluation.comparison import card as comparison
    from quantkit.evaluation.settings import Settings
    from quantkit.quantize.prepare import recipe

    named = list(map(os.fspath, [models] if isinstance(models, str | os.PathLike) else models))
    asked = recipe.filled(Settings, options | ({} if text is None else {"text": os.fspath(text)}), "evaluate")
    asked.check(len(named))
    if card is not None:
        comparison.check(Path(card), named)
    with _listening(progress) as listener:
        from quantkit.evaluation import job

        opened = revision, offline, trust_remote_code
        made = job.measure(named, asked, listener, *opened)
    if card is not None:
        comparison.add(made, Path(card))
    return Evaluation(made)


def inspect(
    path: Place,
    other: Place | None = None,
    *,
    deep: bool = False,
    revision: str | None = None,
    offline: bool = False,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Return what a checkpoint contains and which clients load it, or how two differ. `quantkit inspect`.

    deep: read all values. The error about a damaged checkpoint has the record in `found`.
    """
    from quantkit.inspection import look

    pair = os.fspath(path), None if other is None else os.fspath(other)
    made, error = look.at(*pair, deep, revision, offline, trust_remote_code)
    if error:
        raise error
    return made


def plan(
    model: Place | None = None,
    *,
    params: str | None = None,
    revision: str | None = None,
    offline: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Return whether a model fits a device, its speed there, and the needs of jobs. `quantkit plan`.

    options: by the names of the flags, such as gpu="rtx-3090". params: a number such as 70B, without a model.
    """
    from quantkit.capacity import forecast
    from quantkit.capacity.question import Question
    from quantkit.quantize.prepare import recipe

    question = recipe.filled(Question, options, "plan")
    return forecast.answer(None if model is None else os.fspath(model), params, question, revision, offline)


def auto(
    model: Place,
    *,
    output: Place | None = None,
    resume: bool = False,
    overwrite: bool = False,
    revision: str | None = None,
    offline: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Search the bits of every linear within a budget, and write the result. `quantkit auto`.

    options: by the names of the flags, such as bpw=3.5 or samples=64.
    """
    from quantkit.auto.options import AutoOptions, AutoRequest
    from quantkit.quantize.prepare import recipe

    own = {name: value for name, value in options.items() if name in AutoOptions.__dataclass_fields__}
    asked = recipe.filled(AutoOptions, own, "auto")
    asked.check()
    shared = recipe.of_options("gptq", {name: options[name] for name in options.keys() - own.keys()}).values
    place = None if output is None else Path(output)
    opened = revision, offline, trust_remote_code, resume, overwrite
    with _listening(progress) as listener:
        from quantkit.auto import job, run

        prepared = job.prepare(AutoRequest(os.fspath(model), asked, shared, place, *opened), listener)
        return run.run(prepared, listener)


def verify(
    path: Place,
    base: Place | None = None,
    *,
    trust_remote_code: bool = False,
    progress: Progress | bool = False,
) -> dict[str, Any]:
    """Check files and values of a checkpoint, and with `base` the error of every linear. `quantkit verify`.

    The error about a damaged checkpoint has exit code 6 and the record in `found`.
    """
    with _listening(progress) as listener:
        from quantkit.inspection import verify as verification

        original = None if base is None else os.fspath(base)
        found = verification.verify(os.fspath(path), original, listener.counting, trust_remote_code)
    verification.refuse_damaged(found)
    return found


class _Warning(Progress):
    """Hands warnings to Python's own."""

    def warn(self, text: str) -> None:
        warnings.warn(text, stacklevel=2)


@contextmanager
def _listening(progress: Progress | bool) -> Iterator[Progress]:
    """Yield the listener of a call; leave torch's number of threads as it was."""
    import torch

    from quantkit.cli.progress import listener

    threads = torch.get_num_threads()
    try:
        if progress is True:
            with listener(quiet=False) as display:
                yield display
        else:
            yield progress or _Warning()
    finally:
        torch.set_num_threads(threads)


def __getattr__(name: str) -> Any:
    if name != "Result":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quantkit.evaluation.of_job import Result  # imports torch

    return Result
