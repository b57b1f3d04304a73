"""`quantkit auto` after its checks: search, make, measure, keep the better result."""

import time
from typing import Any

from quantkit.auto import cost, sensitivities
from quantkit.auto.job import RECIPE, Auto
from quantkit.auto.options import BUDGETS
from quantkit.auto.results import GGUF, SEARCHED, UNIFORM, Search
from quantkit.auto.sensitivities import Sensitivities, load, measure
from quantkit.auto.units import bits_per_weight, nbytes
from quantkit.errors import count
from quantkit.models.files import gguf_shards
from quantkit.models.files.atomic import replacing
from quantkit.quantize.prepare.plan import check_disk
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.folder import disk_errors

SCHEMA = "quantkit.auto/1"
AGAIN = "run the same command with --resume"


def run(auto: Auto, progress: Progress) -> dict[str, Any]:
    """Run the search and return its JSON. After an error, sensitivities stay in the search's folder."""
    began = time.monotonic()
    staging = auto.staging  # also after `with_cache`, which returns another Auto
    if auto.is_finished:
        if staging.stored_fingerprint() == auto.fingerprint:  # the process was killed after it published
            with staging.opened(auto.fingerprint, resume=True):
                staging.discard()
        return {"schema": SCHEMA, "output": str(gguf_shards.first(auto.output)), "finished": True}
    check_disk(auto.staging.folder.absolute(), auto.needs()["disk_bytes"])
    progress.phase("hashing the source")
    given = load(auto.request.options.sensitivities, auto.identity, auto.units)
    if note := cost.note(auto):
        progress.warn(note)
    progress.step(1, cost.most_steps(auto))
    with disk_errors(auto.staging.folder, AGAIN), staging.opened(auto.fingerprint, auto.request.resume):
        if saved := load(auto.table, auto.identity, auto.units) or given:
            saved.save(auto.table)  # --overwrite has removed the folder's own table
        table = _sensitivities(auto, saved, progress)
        losses = table.losses(auto.units)
        search, rooms = Search(auto, losses, progress), []
        if auto.request.options.gpu:
            auto, rooms = search.with_cache()
        budget = auto.budget_bytes()
        if budget is None:
            tried = search.within_divergence()
            uniform = search.uniform(tried[-1].record["chosen_bytes"])
        else:
            uniform = search.uniform(budget)
            tried = [search.within_bytes(budget, uniform)]
        searched = tried[-1]
        kept = searched if uniform is None or searched.kld < uniform.kld else uniform
        gguf = search.gguf(kept) if auto.request.options.engine == "any" else None
        auto.check_recipe()  # a file may have appeared
        for path in filter(None, (staging.folder / RECIPE, auto.request.options.recipe_out)):
            with disk_errors(path, AGAIN), replacing(path) as file:
                file.write_text(kept.written, encoding="utf-8")
        staging.publish(kept.path)
    return plan_record(auto) | {
        "cache": auto.cache,
        "rooms": rooms,
        "kept": SEARCHED if kept is searched else UNIFORM,
        SEARCHED: searched.record,
        UNIFORM: uniform and uniform.record,
        GGUF: gguf and gguf.record,
        "tried": [made.record for made in tried] if budget is None else [],
        "reached": auto.request.options.max_kld is None or kept.kld <= auto.request.options.max_kld,
        "recipe": kept.written,
        "choice": dict(searched.preset.choice),
        "sensitivities_read": table is saved,
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
        "least_bits": bits_per_weight(auto.units, {u.name: [*u.candidates][0] for u in auto.units}),
        "most_bits": bits_per_weight(auto.units, {u.name: [*u.candidates][-1] for u in auto.units}),
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


def _sensitivities(auto: Auto, saved: Sensitivities | None, progress: Progress) -> Sensitivities:
    """Measure the units missing in `saved`; return the table, saved after each walk through the model."""
    try:
        table = saved
        if not saved or saved.missing(auto.units):
            for table in measure(auto, progress, saved):
                table.save(auto.table)
        for path in filter(None, (auto.table, auto.request.options.sensitivities)):
            with disk_errors(path, AGAIN):
                table.save(path)
        return table
    finally:
        if not auto.table.exists():  # nothing is kept, so the next run begins anew
            auto.staging.discard()
