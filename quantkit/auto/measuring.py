"""Measuring the sensitivities of a prepared search: the expensive part."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

import torch

from quantkit.auto import streams
from quantkit.auto.curve import Divergence
from quantkit.auto.job import Auto
from quantkit.auto.sensitivities import Sensitivities
from quantkit.auto.solving import Pace, Solving
from quantkit.auto.units import Unit
from quantkit.quantize.progress import Progress

USUAL = "usual"  # folder of blocks as they are while units are replaced
Save = Callable[[Sensitivities], None]


def measure(
    auto: Auto, progress: Progress, known: Sensitivities | None = None, save: Save = lambda table: None
) -> Sensitivities:
    """Measure all units but those that are known. save: is given the table after each walk through the model.

    What is found of a unit does not depend on where an earlier search ended, but for `--search-time`.
    """
    began, prepared, options = time.monotonic(), auto.job, auto.request.options
    known = known or Sensitivities(auto.identity, {}, {}, auto.tokens.numel(), 0.0)
    missing = known.missing(auto.units)
    if not missing:
        return known
    skeleton = prepared.skeleton
    skeleton.streams = False  # a block's experts are replaced together
    progress.phase("loading")
    skeleton.load_rest()
    batch = prepared.plan.execution.batch_size
    tokens, statistics = auto.tokens.split(batch), auto.statistics.split(batch)
    seconds = None if options.search_time is None else 60 * options.search_time - known.seconds
    pace, done = Pace(len(missing), seconds), len(auto.units) - len(missing)
    outside = auto.space.outside(prepared, statistics)
    folder = auto.folder / USUAL
    shutil.rmtree(folder, ignore_errors=True)  # of a search that was killed
    folder.mkdir(parents=True)
    solving = Solving(prepared, auto.space, auto.units, outside, pace, folder)

    def heard(unit: Unit) -> None:
        nonlocal done
        done += 1
        progress.counting("measuring sensitivities", done, len(auto.units))

    def table(found: streams.Found) -> Sensitivities:
        rows: dict[str, dict[str, Divergence]] = {name: {} for name in solving.errors}
        for (unit, candidate), divergence in found.changes.items():
            rows[unit][candidate] = divergence
        return known.joined(dict(solving.errors), rows, time.monotonic() - began, found.usual)

    progress.counting("measuring sensitivities", done, len(auto.units))
    try:
        with torch.no_grad():
            found = streams.measure(
                skeleton, missing, tokens, statistics, solving, auto.streams, heard,
                lambda found: save(table(found)),
            )  # fmt: skip
    finally:
        shutil.rmtree(folder)
    skeleton.model.to("meta")
    if pace.short:
        progress.warn("--search-time: fewer widths were measured of some units than of others")
    return table(found)
