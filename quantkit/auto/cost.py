"""How long a search takes on a CPU, and what of the output it cannot make smaller; known before it runs."""

from dataclasses import replace

from quantkit.auto.job import Auto
from quantkit.capacity import duration, source, speed
from quantkit.capacity import job as capacity_job
from quantkit.tables import megabytes

SOLVED = 2  # candidates of a unit that a search solves: the usual and the measured one
CHOICES_TRIED = 3  # maximum of results to make with --max-kld


def most_steps(auto: Auto) -> int:
    """Return the number of steps of a search: sensitivities, caches, and making and measuring each result."""
    options = auto.request.options
    results = (2 if options.max_kld is None else CHOICES_TRIED + 2) + (options.engine == "any")
    return 1 + (options.gpu is not None) + 2 * results


def seconds(auto: Auto) -> float | None:
    """Return the time of a search; None for an accelerator, on which nothing was measured.

    A result takes the time of its job (`quantkit plan`) and an evaluation of two models.
    """
    execution, options, work = auto.job.plan.execution, auto.request.options, auto.space.method.work
    job_seconds = capacity_job.seconds(auto.job)
    if job_seconds is None:
        return None
    machine = speed.of_machine(execution.dtype).with_threads(execution.threads)
    model = duration.model_of(source.read(str(auto.job.checkpoint.folder)), machine)
    weights = sum(site.weights for site in model.sites)
    rounded = sum(len(unit.candidates) for unit in auto.units) / len(auto.units)
    measured = auto.tokens.numel() * (2 + len(auto.units))
    search = model.forward * (measured / 2 + auto.tokens.numel() + 2 * auto.statistics.numel())
    search += model.logits * measured
    search += model.solve(replace(work, search=0.0), model.sites) * SOLVED
    search += rounded / 3 * weights * duration.NEAREST * model.speed.weight
    products = sum(site.weights * site.columns for site in model.sites)  # errors tr(dW H dWᵀ)
    search += rounded * products * model.speed.float32
    evaluation = 2 * (model.forward + model.logits) * auto.windows.protocol.tokens
    if options.sensitivities and options.sensitivities.exists():
        search = 0.0
    return duration.START + search + (most_steps(auto) - 1) // 2 * (evaluation + job_seconds - duration.START)


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
    outside, budget = outside_bytes(auto), auto.expected_bytes()
    if outside <= budget:
        return None
    head = "--head 8 quantizes the head; " if len(_outside(auto)) == 2 else ""
    return (
        f"embedding and head stay as they are and take {megabytes(outside)}, more than the "
        f"{megabytes(budget)} of all linears that are searched: {head}--engine llama.cpp searches both; "
        "quantkit gptq --layout mlx --embedding 8 quantizes the embedding for mlx-lm"
    )
