"""The Python API: commands as functions that return what `--json` prints. See docs/python.md.

The functions print nothing and raise QuantkitError. `options` have the names of the flags, such as bits=4 or
exclude=["lm_head"]. progress: True shows a bar; a `Progress` hears every step.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import USAGE, refuse_problems, require
from quantkit.errors import QuantkitError as QuantkitError
from quantkit.quantize.prepare import recipe
from quantkit.quantize.prepare.values import filled, keys_of, refuse_unknown
from quantkit.quantize.progress import Progress

if TYPE_CHECKING:
    from quantkit.evaluation.runs import Result

Place = str | os.PathLike[str]  # a folder, a GGUF file or a hub id


@dataclass(frozen=True)
class Evaluation:
    """A comparison of checkpoints. record: the JSON of `quantkit eval`. Notebooks show it as a table."""

    record: dict[str, Any]

    @property
    def passed(self) -> bool:
        """True if every gate passed."""
        return all(gate["pass"] for gate in self.record["gates"])

    def __str__(self) -> str:
        from quantkit.evaluation.comparison.table import markdown

        return markdown(self.record)

    _repr_markdown_ = __str__


def quantize(
    method: str, model: Place, *, output: Place | None = None, evaluate_on: Place | None = None,
    resume: bool = False, overwrite: bool = False, revision: str | None = None, offline: bool = False,
    trust_remote_code: bool = False, progress: Progress | bool = False, **options: Any,
) -> Result:  # fmt: skip
    """Quantize a checkpoint, as `quantkit METHOD`. evaluate_on: text to compare original and output on.

    An interrupted job keeps its finished blocks: call again with resume=True.
    """
    places = {"model": model, "output": output}
    places = {name: os.fspath(place) for name, place in places.items() if place is not None}
    request = recipe.merge(
        recipe.of_options(method, options | places), (), {}, revision=revision, offline=offline,
        trust_remote_code=trust_remote_code, resume=resume, overwrite=overwrite,
    )  # fmt: skip
    with _listening(progress) as listener:
        from quantkit.evaluation import runs
        from quantkit.quantize import job
        from quantkit.quantize.outputs import finish

        outputs, jobs = job.prepare_all(request, listener)
        if not jobs:
            _, jobs = job.prepare_all(replace(request, resume=False), Progress(), dry_run=True)
            return runs.Result(outputs, list(map(finish.of_finished, jobs)), finished=True)
        return runs.run(jobs, evaluate_on, listener)


def evaluate(
    models: Place | Sequence[Place], text: Place | None = None, *, card: Place | None = None,
    revision: str | None = None, offline: bool = False, trust_remote_code: bool = False,
    progress: Progress | bool = False, **options: Any,
) -> Evaluation:  # fmt: skip
    """Compare checkpoints with the first, as `quantkit eval`. A failed gate is no error: see `passed`. Nor is
    a model that the engine does not run: see `engine_declined`.

    text: a file, or a dataset such as wikitext2; None: the shipped held-out text. card: the model whose card
    gets its results.
    """
    from quantkit.evaluation.settings import EvalSettings

    named = [models] if isinstance(models, str | os.PathLike) else models
    require(named, "evaluate has no model", "give a folder, a GGUF file or a hub id", USAGE)
    asked = filled(EvalSettings, options | ({} if text is None else {"text": os.fspath(text)}), "evaluate")
    with _listening(progress) as listener:
        from quantkit.evaluation import runs

        opened = revision, offline, trust_remote_code, Path(card) if card else None
        return Evaluation(runs.measure(list(map(os.fspath, named)), asked, listener, *opened))


def inspect(
    path: Place, other: Place | None = None, *, deep: bool = False, revision: str | None = None,
    offline: bool = False, trust_remote_code: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return what a checkpoint contains and which clients load it, or how two differ. deep: read all values.

    The error about a damaged checkpoint has the record in `found`.
    """
    from quantkit.inspection import look

    pair = os.fspath(path), other and os.fspath(other)
    made, problems = look.at(*pair, deep, revision, offline, trust_remote_code)
    refuse_problems(made, problems)
    return made


def plan(
    model: Place | None = None, *, params: str | float | None = None, revision: str | None = None,
    offline: bool = False, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return whether a model fits a device, its speed there, and the needs of jobs. params: "70B" or 70e9."""
    from quantkit.capacity import forecast
    from quantkit.capacity.question import Question

    question = filled(Question, options, "plan")
    return forecast.answer(model and os.fspath(model), params and str(params), question, revision, offline)


def auto(
    model: Place, *, output: Place | None = None, resume: bool = False, overwrite: bool = False,
    revision: str | None = None, offline: bool = False, trust_remote_code: bool = False,
    progress: Progress | bool = False, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Search the bits of every linear within a budget such as bpw=3.5, and write the result."""
    from quantkit.auto.options import AutoOptions, AutoRequest

    fields = keys_of(AutoOptions)
    refuse_unknown("auto", options, [*fields, *(key.rpartition(".")[2] for key in recipe.keys("gptq"))])
    search = filled(AutoOptions, {name: options[name] for name in options if name in fields}, "auto")
    search.check()
    others = {name: options[name] for name in options if name not in fields}
    shared = recipe.of_options("gptq", others).values
    flags = {"output": output and Path(output), "resume": resume, "overwrite": overwrite}
    flags |= {"revision": revision, "offline": offline, "trust_remote_code": trust_remote_code}
    with _listening(progress) as listener:
        from quantkit.auto import job, run

        request = AutoRequest(os.fspath(model), search, shared, **flags)
        return run.run(job.prepare(request, listener), listener)


def convert(
    model: Place, to: str, *, output: Place | None = None, overwrite: bool = False,
    progress: Progress | bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Store the integers of a quantized checkpoint in another layout, such as "awq" or "q4_0"."""
    with _listening(progress) as listener:
        from quantkit.quantize import convert as conversion

        return conversion.convert(os.fspath(model), to, output and Path(output), overwrite, listener)


def push(
    path: Place, repo: str, *, private: bool = False, revision: str | None = None,
    progress: Progress | bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Verify a checkpoint that quantkit wrote and upload it to the hub, with huggingface_hub's token."""
    with _listening(progress) as listener:
        from quantkit.inspection import publish

        return publish.push(os.fspath(path), repo, private, revision, listener.counting)


def verify(
    path: Place, base: Place | None = None, *, reproduce: int | str | None = None,
    calibration: Place | None = None, seed: int | None = None, trust_remote_code: bool = False,
    progress: Progress | bool = False, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Check files and values of a checkpoint; with `base`, measure the error of every linear again; with
    `engine`, `python` and `engine_option` as in `evaluate`, compare what an engine computes.

    reproduce: how many blocks are also solved again, or "all"; calibration: the text of the job, by default
    as the manifest says; seed: chooses the blocks.

    The error about a damaged checkpoint has exit code 6 and the record in `found`.
    """
    from quantkit.evaluation.settings import EvalSettings

    asked = filled(EvalSettings, options, "verify", ("engine", "python", "engine_option"))
    asked.check()
    with _listening(progress) as listener:
        from quantkit.evaluation import served

        pair, text = (os.fspath(path), base and os.fspath(base)), calibration and os.fspath(calibration)
        record = served.verify(*pair, asked, listener, trust_remote_code, reproduce, seed, text)
    served.refuse(record, pair[1])
    return record


@contextmanager
def _listening(progress: Progress | bool) -> Iterator[Progress]:
    """Yield the listener of a call; leave torch's number of threads as it was."""
    import torch

    from quantkit.cli.streams import listener

    threads = torch.get_num_threads()
    try:
        if progress is True:
            with listener(quiet=False, computes=False) as display:
                yield display
        else:
            silent = Progress()
            silent.warn = warnings.warn
            yield progress or silent
    finally:
        torch.set_num_threads(threads)
