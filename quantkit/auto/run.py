"""Search, make, measure, keep the better: what `quantkit auto` does once all is checked."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.auto import allocation, sensitivities
from quantkit.auto.job import Auto
from quantkit.auto.measuring import USUAL, measure
from quantkit.auto.sensitivities import Sensitivities
from quantkit.auto.units import Choice, Preset, anchors, bits_per_weight, nbytes
from quantkit.errors import USAGE, QuantkitError, count
from quantkit.evaluation import evaluate
from quantkit.models.files.open import open_checkpoint
from quantkit.quantize import job, loop
from quantkit.quantize.prepare import finished
from quantkit.quantize.prepare.plan import check_disk
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import replacing
from quantkit.quantize.staging.folder import disk_errors

SCHEMA = "quantkit.auto/1"
TABLE = "sensitivities.json"
METRICS = frozenset({"ppl", "dppl", "kld", "top1"})
FEW_TOKENS = 1000  # measured on fewer, which of two results is better may be chance
TRIES = 3  # of the search for the smallest model within a divergence
SIZES = 6  # of that for one whose files fit: a tiny model's configuration weighs as much as its choices
CLOSE = 0.9  # share of the divergence asked for above which a result is not made smaller


@dataclass(frozen=True)
class Made:
    """One output, measured. predicted: the sum of its units' divergences, on calibration text; kld: measured
    on the text that results are measured on. disk_bytes: of all its files."""

    name: str
    place: Path
    written: str
    choice: Choice
    predicted: float
    nbytes: int
    disk_bytes: int
    kld: float
    kld_stderr: float
    ppl: float

    def record(self, auto: Auto) -> dict[str, Any]:
        """JSON of it."""
        return {
            "name": self.name,
            "bits_per_weight": bits_per_weight(auto.units, self.choice),
            "chosen_bytes": self.nbytes,
            "disk_bytes": self.disk_bytes,
            "predicted_kld": self.predicted,
            "kld": self.kld,
            "kld_stderr": self.kld_stderr,
            "ppl": self.ppl,
        }


def run(auto: Auto, progress: Progress) -> dict[str, Any]:
    """The whole search; its record. What was measured survives an error, in the folder beside the output."""
    began = time.monotonic()
    if (measured_on := auto.windows.protocol.tokens) < FEW_TOKENS:
        more = "a longer text" if auto.request.options.text else "a text with --text"
        progress.warn(
            f"{measured_on} tokens to measure on are few: which result is better may be chance; give {more}"
        )
    check_disk(auto.folder.absolute(), auto.needs()["disk_bytes"])
    known = _open(auto, progress)
    with disk_errors(auto.folder, "run the same command with --resume"):
        table = _sensitivities(auto, known, progress)
        losses = table.losses(auto.units)
        tried = _within_divergence(auto, losses, progress) if auto.budget_bytes() is None else None
        searched = tried[-1] if tried else _within_bytes(auto, losses, auto.budget_bytes(), progress)
        uniform = _uniform(auto, losses, searched, progress)
        kept = searched if uniform is None or searched.kld < uniform.kld else uniform
        if recipe := auto.request.options.recipe_out:
            recipe.write_text(kept.written, encoding="utf-8")
        _publish(auto, kept)
    record = plan_record(auto) | {
        "output": str(auto.output),
        "kept": "searched" if kept is searched else "uniform",
        "searched": searched.record(auto),
        "uniform": uniform and uniform.record(auto),
        "tried": [one.record(auto) for one in tried or ()],
        "reached": auto.request.options.max_kld is None or kept.kld <= auto.request.options.max_kld,
        "recipe": kept.written,
        "choice": dict(searched.choice),
        "measured_on": vars(auto.windows.protocol),
        "sensitivities_seconds": table.seconds,
        "seconds": time.monotonic() - began,
    }
    return record


def plan_record(auto: Auto) -> dict[str, Any]:
    """What is known before anything is measured."""
    options = auto.request.options
    return {
        "schema": SCHEMA,
        "source": auto.request.source,
        "output": str(auto.output),
        "engine": options.engine,
        "budget": {name: getattr(options, name) for name in ("bpw", "max_size", "max_kld")},
        "budget_bytes": auto.budget_bytes(),
        "units": len(auto.units),
        "weights": auto.weights,
        "candidates": sum(len(unit.candidates) for unit in auto.units),
        "streams": sum(len(anchors(unit)) - (unit.block is not None) for unit in auto.units),
        "least_bits": bits_per_weight(auto.units, {u.name: u.candidates[0].name for u in auto.units}),
        "most_bits": bits_per_weight(auto.units, {u.name: u.candidates[-1].name for u in auto.units}),
        "presets": {
            preset.name: bits_per_weight(auto.units, preset.choice)
            for preset in sorted(auto.presets, key=lambda one: nbytes(auto.units, one.choice))
        },
        "search_tokens": auto.tokens.numel(),
        "statistics_tokens": auto.statistics.numel(),
        "held_out_sequences": auto.held_out,
        "measured_on": vars(auto.windows.protocol),
        "needs": auto.needs(),
        "device": auto.job.plan.execution.device,
    }


def kept(auto: Auto) -> str:
    """What of the search survives, should it end now."""
    place = auto.folder / TABLE
    if not place.exists():
        return "nothing yet is"
    left = len(sensitivities.read(place).missing(auto.units))
    if left:
        return f"sensitivities of {len(auto.units) - left} of {count(len(auto.units), 'unit')} are"
    return "the table of sensitivities and what was made of it are"


def _open(auto: Auto, progress: Progress) -> Sensitivities | None:
    """Make the folder next to the output; return the saved table that lacks the fewest units.

    Raises QuantkitError if the folder holds another search, or a table is not of this one.
    """
    folder, request = auto.folder, auto.request
    ours = folder.is_dir() and {path.name for path in folder.iterdir()} <= {
        TABLE,
        USUAL,
        "searched",
        "uniform",
    }
    if folder.exists() and not ours:
        raise QuantkitError(f"{folder} is no unfinished search", "move it away, or choose --output", USAGE)
    if (folder / TABLE).exists() and not (request.resume or request.overwrite):
        hint = "continue it with --resume, or start again with --overwrite"
        raise QuantkitError(f"{folder} holds an unfinished search", hint, USAGE)
    progress.phase("hashing the source")
    own = [folder / TABLE] if request.resume else []
    places = [place for place in (*own, request.options.sensitivities) if place and place.exists()]
    tables = [sensitivities.load(place, auto.identity, auto.units) for place in places]
    if not request.resume:
        _clear(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return min(tables, key=lambda table: len(table.missing(auto.units)), default=None)


def _sensitivities(auto: Auto, known: Sensitivities | None, progress: Progress) -> Sensitivities:
    """The known table with the missing units measured; it is saved after each walk through the model."""
    tables = [auto.folder / TABLE, *filter(None, [auto.request.options.sensitivities])]

    def save(table: Sensitivities) -> None:
        for place in tables:
            table.save(place)

    try:
        table = measure(auto, progress, known, save) if known is None or known.missing(auto.units) else known
        save(table)
        return table
    finally:
        if not (auto.folder / TABLE).exists():  # nothing is kept, so the next run begins anew
            shutil.rmtree(auto.folder)


def _within_bytes(auto: Auto, losses: allocation.Losses, budget: int, progress: Progress) -> Made:
    """The best choice of that size; smaller, where its files take more than was asked for."""
    limit = None
    if auto.request.options.max_size is not None:
        limit = budget + auto.fixed_bytes
    for attempt in range(SIZES):
        choice = allocation.within_bytes(auto.units, losses, budget)
        found = _made(auto, "searched", choice, auto.space.values(auto.units, choice), losses, progress)
        if limit is None or found.disk_bytes <= limit:
            return found
        budget -= (found.disk_bytes - limit) << attempt  # another choice takes more or less to be told
        shutil.rmtree(found.place.parent)
    raise QuantkitError(
        f"the files take {found.disk_bytes:,} bytes, whatever is chosen", "raise --max-size", USAGE
    )


def _within_divergence(auto: Auto, losses: allocation.Losses, progress: Progress) -> list[Made]:
    """The smallest choice whose measured divergence fits, the last of those that were tried: where the
    prediction was off, the bound is moved by as much."""
    wanted = auto.request.options.max_kld
    bound, tried, best = wanted, [], None
    for _ in range(TRIES):
        choice = allocation.within_loss(auto.units, losses, bound)
        if tried and choice == tried[-1].choice:
            break
        _clear(auto.folder / "searched")
        found = _made(auto, "searched", choice, auto.space.values(auto.units, choice), losses, progress)
        tried.append(found)
        if found.kld <= wanted and (best is None or found.nbytes < best.nbytes):
            best = found
        if CLOSE * wanted <= found.kld <= wanted:
            break
        margin = 0.5 * (1 + CLOSE)
        bound = max(found.predicted * wanted * margin / max(found.kld, 1e-30), 1e-30)
    if best is None:
        progress.warn(f"no choice within a divergence of {wanted:g} was found; the nearest is kept")
        best = min(tried, key=lambda one: one.kld)
    if best is not tried[-1]:  # made again: one lies there at a time
        _clear(auto.folder / "searched")
        values = auto.space.values(auto.units, best.choice)
        tried.append(_made(auto, "searched", best.choice, values, losses, progress))
    return tried


def _uniform(auto: Auto, losses: allocation.Losses, searched: Made, progress: Progress) -> Made | None:
    """The best preset that the budget allows, made and measured; None where all are larger. A budget of files
    or of a divergence allows what is no larger than what the search found."""
    allowed = searched.nbytes if auto.request.options.bpw is None else auto.budget_bytes()
    fit = [one for one in auto.presets if nbytes(auto.units, one.choice) <= allowed]
    if not fit:
        return None

    def predicted(preset: Preset) -> float:
        return sum(losses[item] for item in preset.choice.items())

    best = min(fit, key=lambda preset: (predicted(preset), preset.name))
    return _made(auto, "uniform", best.choice, best.values, losses, progress, best.name)


def _made(
    auto: Auto,
    what: str,
    choice: Choice,
    values: Any,
    losses: allocation.Losses,
    progress: Progress,
    name: str = "searched",
) -> Made:
    """Make an output of a choice, unless it is there, and measure it."""
    size = bits_per_weight(auto.units, choice)
    described = f"{auto.request.source} at {size:.3f} bits per weight for {auto.request.options.engine}"
    written = auto.recipe(values, described)
    place = auto.folder / what / auto.output.name
    request = auto.job_of(written, place)
    if not (auto.request.resume and finished.is_done(request)):
        place.parent.mkdir(exist_ok=True)
        progress.phase(f"making {what if name == 'searched' else name}")
        loop.run(job.prepare(request, progress), progress)
    metrics = _evaluated(auto, place, progress)
    return Made(
        name,
        place,
        written,
        choice,
        sum(losses[item] for item in choice.items()),
        nbytes(auto.units, choice),
        _disk_bytes(place),
        metrics.kld.mean,
        metrics.kld.stderr,
        metrics.ppl.value,
    )


def _evaluated(auto: Auto, place: Path, progress: Progress) -> Any:
    """Metrics of an output against the original, in float32."""
    source = auto.job.checkpoint
    found = open_checkpoint(str(place), trust_remote_code=source.trust_remote_code)
    device = auto.job.plan.execution.torch_device

    def listen(name: str, done: int, total: int) -> None:
        progress.counting(f"evaluating {name}", done, total)

    result = evaluate.evaluate([source, found], auto.windows, torch.float32, device, listen, chosen=METRICS)
    return result.results[1].metrics


def _disk_bytes(place: Path) -> int:
    files = place.iterdir() if place.is_dir() else [place]
    return sum(path.stat().st_size for path in files)


def _clear(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _publish(auto: Auto, kept: Made) -> None:
    """Rename what is kept into place, and remove the rest; the table stays where it was asked for."""
    if auto.output.exists():
        replacing.check(auto.output, auto.space.method == "gguf", auto.request.overwrite)
        old = auto.folder / "searched" / "replaced"
        old.parent.mkdir(exist_ok=True)
        os.rename(auto.output, old)
    auto.output.parent.mkdir(parents=True, exist_ok=True)
    os.rename(kept.place, auto.output)
    shutil.rmtree(auto.folder)
