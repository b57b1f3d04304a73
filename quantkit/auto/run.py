"""`quantkit auto` after its checks: search, make, measure, keep the better result."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quantkit.auto import allocation, cost, sensitivities
from quantkit.auto.job import TABLE, Auto
from quantkit.auto.options import BUDGETS
from quantkit.auto.sensitivities import USUAL, Sensitivities, measure
from quantkit.auto.units import Choice, Preset, bits_per_weight, nbytes
from quantkit.errors import USAGE, QuantkitError, count
from quantkit.evaluation import evaluate
from quantkit.models.files import gguf_shards
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.quantize import job, loop
from quantkit.quantize.prepare import finished
from quantkit.quantize.prepare.plan import check_disk
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import may_replace
from quantkit.quantize.staging.folder import disk_errors, put
from quantkit.tables import megabytes

SCHEMA = "quantkit.auto/1"
SEARCHED, UNIFORM = "searched", "uniform"
METRICS = frozenset({"ppl", "dppl", "kld", "top1"})
FEW_TOKENS = 1000  # with fewer tokens, the better result may be chance
SIZES_TRIED = 6  # limit of results with --max-size; several are needed where small files weigh much
CLOSE = 0.9  # a result above this share of --max-kld is good enough


@dataclass(frozen=True)
class Made:
    """A measured output. written: its recipe. record: its JSON, with predicted_kld (sum of the units' losses
    on calibration text), kld (measured on held-out text), output_bytes (all tensors) and disk_bytes (all
    files)."""

    preset: Preset
    path: Path
    written: str
    record: dict[str, Any]

    @property
    def kld(self) -> float:
        return self.record["kld"]


def run(auto: Auto, progress: Progress) -> dict[str, Any]:
    """Run the search and return its JSON. After an error, sensitivities stay in the search's folder."""
    began = time.monotonic()
    if (measured_on := auto.windows.protocol.tokens) < FEW_TOKENS:
        more = "a longer text" if auto.request.options.text else "a text with --text"
        progress.warn(
            f"results are compared on only {measured_on} tokens, so the better may be chance; give {more}"
        )
    check_disk(auto.folder.absolute(), auto.needs()["disk_bytes"])
    saved = _open(auto, progress)
    if note := cost.note(auto):
        progress.warn(note)
    progress.step(1, cost.most_steps(auto))
    with disk_errors(auto.folder, "run the same command with --resume"):
        table = _sensitivities(auto, saved, progress)
        losses = table.losses(auto.units)
        search, rooms = _Search(auto, losses, progress), []
        if auto.request.options.gpu:
            auto, rooms = search.with_cache()
        budget = auto.budget_bytes()
        tried = search.within_divergence() if budget is None else [search.within_bytes(budget)]
        searched, uniform = tried[-1], search.uniform(tried[-1])
        kept = searched if uniform is None or searched.kld < uniform.kld else uniform
        if recipe := auto.request.options.recipe_out:
            recipe.write_text(kept.written, encoding="utf-8")
        _publish(auto, kept)
    return plan_record(auto) | {
        "cache": auto.cache,
        "rooms": rooms,
        "kept": SEARCHED if kept is searched else UNIFORM,
        SEARCHED: searched.record,
        UNIFORM: uniform and uniform.record,
        "tried": [made.record for made in tried] if budget is None else [],
        "reached": auto.request.options.max_kld is None or kept.kld <= auto.request.options.max_kld,
        "recipe": kept.written,
        "choice": dict(searched.preset.choice),
        "sensitivities_seconds": table.seconds,
        "seconds": time.monotonic() - began,
    }


def plan_record(auto: Auto) -> dict[str, Any]:
    """Return the JSON of a dry run."""
    options = auto.request.options
    return {
        "schema": SCHEMA,
        "source": auto.request.source,
        "output": str(gguf_shards.first(auto.output)),
        "engine": options.engine,
        "budget": {name: getattr(options, name) for name in (*BUDGETS, "batch")},
        "rooms": auto.rooms if options.gpu else [],
        "budget_bytes": auto.budget_bytes(),
        "units": len(auto.units),
        "weights": auto.weights,
        "candidates": sum(len(unit.candidates) for unit in auto.units),
        "streams": cost.streams(auto),
        "least_bits": bits_per_weight(auto.units, {u.name: u.candidates[0].name for u in auto.units}),
        "most_bits": bits_per_weight(auto.units, {u.name: u.candidates[-1].name for u in auto.units}),
        "presets": {
            preset.name: bits_per_weight(auto.units, preset.choice)
            for preset in sorted(auto.presets, key=lambda preset: nbytes(auto.units, preset.choice))
        },
        "search_tokens": auto.tokens.numel(),
        "statistics_tokens": auto.statistics.numel(),
        "held_out_sequences": auto.held_out,
        "measured_on": vars(auto.windows.protocol),
        "needs": auto.needs(),
        "outside_bytes": cost.outside_bytes(auto),
        "expected_seconds": cost.seconds(auto),
        "device": auto.job.plan.execution.device,
    }


def kept(auto: Auto) -> str:
    """Return a phrase that says what remains of an interrupted search."""
    if not auto.table.exists():
        return "nothing yet is"
    left = len(sensitivities.read(auto.table).missing(auto.units))
    if left:
        return f"sensitivities of {len(auto.units) - left} of {count(len(auto.units), 'unit')} are"
    return "the table of sensitivities and the finished outputs are"


def _open(auto: Auto, progress: Progress) -> Sensitivities | None:
    """Create the search's folder; return the saved table of sensitivities, or None.

    Raises QuantkitError if the folder or the table belongs to another search.
    """
    folder, request = auto.folder, auto.request
    names = {TABLE, USUAL, SEARCHED, UNIFORM}
    if folder.exists() and not (folder.is_dir() and {path.name for path in folder.iterdir()} <= names):
        hint = "move the folder away, or choose another --output"
        raise QuantkitError(f"{folder} is not an unfinished search", hint, USAGE)
    if folder.exists() and any(folder.iterdir()) and not (request.resume or request.overwrite):
        hint = "continue with --resume, or start again with --overwrite"
        raise QuantkitError(f"{folder} holds an unfinished search", hint, USAGE)
    if not request.resume:
        _clear(folder)
    progress.phase("hashing the source")
    paths = (auto.table, request.options.sensitivities)
    path = next((path for path in paths if path and path.exists()), None)
    table = path and sensitivities.load(path, auto.identity, auto.units)
    folder.mkdir(parents=True, exist_ok=True)
    return table


def _sensitivities(auto: Auto, saved: Sensitivities | None, progress: Progress) -> Sensitivities:
    """Measure the units missing in `saved`; return the table, saved after each walk through the model."""
    try:
        table = saved
        if not saved or saved.missing(auto.units):
            for table in measure(auto, progress, saved):
                table.save(auto.table)
        for path in filter(None, (auto.table, auto.request.options.sensitivities)):
            table.save(path)
        return table
    finally:
        if not auto.table.exists():  # nothing is kept, so the next run begins anew
            shutil.rmtree(auto.folder)


class _Search:
    """Makes and measures outputs. losses: {(unit, candidate): added divergence}."""

    def __init__(self, auto: Auto, losses: allocation.Losses, progress: Progress):
        self._auto, self._losses, self._progress = auto, losses, progress
        self._steps, self._most_steps = 1, cost.most_steps(auto)  # the first step measured sensitivities

    def _next_step(self) -> None:
        self._steps += 1
        self._progress.step(self._steps, max(self._steps, self._most_steps))

    def with_cache(self) -> tuple[Auto, list[dict[str, Any]]]:
        """Choose the type of the KV cache with the least divergence of weights and cache together. Return the
        search with this type, and the `rooms` that hold the smallest weights, each with both divergences."""
        auto, losses = self._auto, self._losses
        results = self._evaluated([auto.job.checkpoint], auto.space.caches)
        measured, rooms = {result.kv.dtype: result.metrics.kld.mean for result in results[1:]}, []
        smallest = sum(unit.candidates[0].nbytes for unit in auto.units)
        for room in auto.rooms:
            if room["bytes"] >= smallest:
                predicted = self._predicted(allocation.within_bytes(auto.units, losses, room["bytes"]))
                rooms.append(room | {"predicted_kld": predicted, "cache_kld": measured[room["cache"]]})
        whole = [room for room in rooms if room["ctx"] == auto.rooms[0]["ctx"]]
        best = min(whole, key=lambda room: room["predicted_kld"] + room["cache_kld"])
        self._auto = replace(auto, cache=best["cache"])
        return self._auto, rooms

    def within_bytes(self, budget: int) -> Made:
        """Make the best choice within `budget` bytes, and smaller choices while files exceed --max-size."""
        auto, limit = self._auto, None
        if auto.request.options.max_size is not None:
            limit = budget + auto.fixed_bytes
        for attempt in range(SIZES_TRIED):
            made = self._made(allocation.within_bytes(auto.units, self._losses, budget))
            taken = made.record["disk_bytes"]
            if limit is None or taken <= limit:
                return made
            budget -= (taken - limit) << attempt  # the recipe's size changes with the choice
        raise QuantkitError(f"the files take {megabytes(taken)} or more", "raise --max-size", USAGE)

    def within_divergence(self) -> list[Made]:
        """Make choices until the measured divergence is within --max-kld; return all, the best last. After
        each result, the bound for the predicted divergence is corrected by the error of the prediction."""
        most = bound = self._auto.request.options.max_kld
        tried: list[Made] = []
        for _ in range(cost.CHOICES_TRIED):
            choice = allocation.within_loss(self._auto.units, self._losses, bound)
            if tried and choice == tried[-1].preset.choice:
                break
            _clear(self._auto.folder / SEARCHED)
            tried.append(made := self._made(choice))
            if CLOSE * most <= made.kld <= most:
                break
            margin = 0.5 * (1 + CLOSE)
            bound = max(made.record["predicted_kld"] * most * margin / max(made.kld, 1e-30), 1e-30)
        if fit := [made for made in tried if made.kld <= most]:
            best = min(fit, key=lambda made: made.record["chosen_bytes"])
        else:
            self._progress.warn(f"no result stays within a divergence of {most:g}; the closest is kept")
            best = min(tried, key=lambda made: made.kld)
        if best is not tried[-1]:  # made again: the folder holds one result at a time
            _clear(self._auto.folder / SEARCHED)
            tried.append(self._made(best.preset.choice))
        return tried

    def uniform(self, searched: Made) -> Made | None:
        """Make the best preset within the budget; return None if all presets are larger. With --max-size or
        --max-kld the budget is the size of `searched`."""
        auto, allowed = self._auto, searched.record["chosen_bytes"]
        if auto.request.options.bpw is not None:
            allowed = auto.budget_bytes()
        fit = [preset for preset in auto.presets if nbytes(auto.units, preset.choice) <= allowed]
        best = min(fit, key=lambda preset: (self._predicted(preset.choice), preset.name), default=None)
        return best and self._make(best, UNIFORM, best.name)

    def _predicted(self, choice: Choice) -> float:
        return sum(self._losses[item] for item in choice.items())

    def _made(self, choice: Choice) -> Made:
        values = self._auto.space.values(self._auto.units, choice)
        return self._make(Preset(SEARCHED, choice, values), SEARCHED, SEARCHED)

    def _make(self, preset: Preset, folder: str, name: str) -> Made:
        """Make a choice's output, unless it is finished, and compare it with the original in float32."""
        auto, progress = self._auto, self._progress
        bits = bits_per_weight(auto.units, preset.choice)
        described = f"{auto.request.source} at {bits:.3f} bits per weight for {auto.request.options.engine}"
        written = auto.recipe(preset.values, described)
        path = auto.folder / folder / auto.output.name
        self._next_step()
        request = auto.job_of(written, path)
        if not (auto.request.resume and finished.is_done(request)):
            path.parent.mkdir(exist_ok=True)
            progress.phase(f"making {name}")
            loop.run([job.prepare(request, progress)], progress)
        source = auto.job.checkpoint
        models = [source, open_checkpoint(str(path), trust_remote_code=source.trust_remote_code)]
        *_, result = self._evaluated(models, (auto.cache,) if auto.cache else ())
        metrics, size = result.metrics, result.size
        record = {
            "name": preset.name,
            "bits_per_weight": bits,
            "chosen_bytes": nbytes(auto.units, preset.choice),
            "bits_per_weight_model": size.bits_per_weight,
            "output_bytes": size.weight_bytes,
            "disk_bytes": size.disk_bytes,
            "predicted_kld": self._predicted(preset.choice),
            "kld": metrics.kld.mean,
            "kld_stderr": metrics.kld.stderr,
            "ppl": metrics.ppl.value,
        }
        return Made(preset, path, written, record)

    def _evaluated(self, models: Sequence[Checkpoint], caches: Sequence[str]) -> list[evaluate.Result]:
        """Measure models in float32, also with types of the KV cache."""
        self._next_step()
        device, listen = self._auto.job.plan.execution.torch_device, self._progress.evaluating
        asked = {"chosen": METRICS, "kv_dtypes": caches}
        return evaluate.evaluate(models, self._auto.windows, torch.float32, device, listen, **asked).results


def _clear(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _publish(auto: Auto, kept: Made) -> None:
    """Move the kept output to its place and remove the search's folder."""
    may_replace.check(auto.output, auto.space.method.name == "gguf", auto.request.overwrite)
    auto.output.parent.mkdir(parents=True, exist_ok=True)
    put(kept.path, auto.output, auto.folder / "replaced")
    shutil.rmtree(auto.folder)
