"""How long a search takes on a CPU, and what of the output it cannot make smaller; known before it runs."""

from __future__ import annotations

import math
from functools import partial

from quantkit.auto.job import Auto
from quantkit.auto.units import nbytes, usual
from quantkit.capacity import job as capacity_job
from quantkit.capacity import source
from quantkit.capacity.question import Question
from quantkit.models.machine import processor
from quantkit.tables import megabytes

SOLVED = 2  # candidates of a unit that a search solves: the usual and the measured one
CHOICES_TRIED = 3  # maximum of results to make with --max-kld


def most_steps(auto: Auto) -> int:
    """Return the number of steps of a search: sensitivities, caches, and making and measuring each result."""
    options = auto.request.options
    results = (2 if options.max_kld is None else CHOICES_TRIED + 2) + (options.engine == "any")
    return 1 + (options.gpu is not None) + 2 * results


def seconds(auto: Auto) -> tuple[float, float] | None:
    """Return the shortest and the longest time; None for an accelerator, on which nothing was measured.

    A result takes the time of its job (`quantkit plan`) and an evaluation of two models.
    """
    execution, options = auto.job.plan.execution, auto.request.options
    if execution.device != "cpu":
        return None
    samples, seqlen = auto.job.calibration.tokens.shape
    read, question = source.read(str(auto.job.checkpoint.folder)), Question(samples=samples, seqlen=seqlen)
    job_seconds = capacity_job.of_model(read, question)[auto.space.method.name]["seconds"]
    if job_seconds is None:
        return None
    work, specs = auto.space.method.work, [spec for spec in auto.job.specs if spec.grid]
    config, weights = auto.job.checkpoint.text_config, sum(spec.weights for spec in specs)
    forward, head = capacity_job.forward_operations(weights), 2 * config.hidden_size * config.vocab_size
    rounded = sum(len(unit.candidates) for unit in auto.units) / len(auto.units)
    measured = auto.tokens.numel() * (2 + len(auto.units))
    search = forward * (measured / 2 + auto.tokens.numel() + 2 * auto.statistics.numel()) + head * measured
    shapes = [(spec.out_features, spec.in_features) for spec in specs]
    search += capacity_job.solver_operations(work, shapes) * SOLVED
    search += 2 * rounded * sum(math.prod(shape) * shape[1] for shape in shapes)  # errors tr(dW H dWᵀ)
    evaluation = 2 * (forward + head) * auto.windows.protocol.tokens
    cpu_seconds = partial(capacity_job.cpu_seconds, work, cores=execution.threads)
    searches, evaluations = cpu_seconds(search, weights * (rounded / 3 + SOLVED)), cpu_seconds(evaluation, 0)
    if options.sensitivities and options.sensitivities.exists():
        searches = [0.0, 0.0]
    slower, results = processor.cores() / execution.threads, (2, (most_steps(auto) - 1) // 2)
    bounds = zip(capacity_job.START_SECONDS, job_seconds, searches, evaluations, results, strict=True)
    shortest, longest = (
        start + search + count * (evaluation + (job - start) * slower)
        for start, job, search, evaluation, count in bounds
    )
    return shortest, longest


def outside_bytes(auto: Auto) -> int:
    """Return the bytes of embedding and head that stay in 16 bit, because the engine reads no others."""
    searched = any(unit.block is None for unit in auto.units)
    return 0 if searched else sum(_outside(auto).values())


def _outside(auto: Auto) -> dict[str, int]:
    """Return the bytes of embedding and head in 16 bit, by their stored names: one entry if they are tied."""
    skeleton = auto.job.skeleton
    both = [skeleton.model.get_input_embeddings(), skeleton.model.get_output_embeddings()]
    both = both[:1] if auto.request.options.head else both
    names = (f"{name}.weight" for name, module in skeleton.model.named_modules() if module in both)
    stored = {skeleton.names.stored[name] for name in names if name in skeleton.names.stored}
    return {name: skeleton.checkpoint.infos[name].nbytes for name in stored}


def note(auto: Auto) -> str | None:
    """Return a line if embedding and head take more of the output than all that is searched."""
    outside, budget = outside_bytes(auto), auto.budget_bytes()
    if budget is None:
        budget = nbytes(auto.units, {unit.name: usual(unit).name for unit in auto.units})
    if outside <= budget:
        return None
    head = "--head 8 quantizes the head; " if len(_outside(auto)) == 2 else ""
    return (
        f"embedding and head stay as they are and take {megabytes(outside)}, more than the "
        f"{megabytes(budget)} of all linears that are searched: {head}--engine llama.cpp searches both; "
        "quantkit gptq --layout mlx --embedding 8 quantizes the embedding for mlx-lm"
    )
