"""Measuring the sensitivities of a prepared search: the expensive part."""

from __future__ import annotations

import time

import torch

from quantkit.capacity.budget import streams
from quantkit.capacity.budget.curve import Divergence
from quantkit.capacity.budget.job import Auto
from quantkit.capacity.budget.sensitivities import Sensitivities
from quantkit.capacity.budget.solving import Pace, Solving
from quantkit.capacity.budget.units import Unit
from quantkit.models.device import free_memory
from quantkit.quantize.progress import Progress

STREAMS_SHARE = 0.25  # of the free memory that streams may take


def measure(auto: Auto, progress: Progress) -> Sensitivities:
    """Measure all units."""
    began, prepared, options = time.monotonic(), auto.job, auto.request.options
    skeleton = prepared.skeleton
    skeleton.streams = False  # a block's experts are replaced together
    progress.phase("loading")
    skeleton.load_rest()
    batch = prepared.plan.execution.batch_size
    tokens, statistics = auto.tokens.split(batch), auto.statistics.split(batch)
    seconds = None if options.search_time is None else 60 * options.search_time
    pace, done = Pace(len(auto.units), seconds), 0
    solving = Solving(prepared, auto.space, auto.space.outside(prepared, statistics), pace)

    def heard(unit: Unit) -> None:
        nonlocal done
        done += 1
        progress.counting("measuring sensitivities", done, len(auto.units))

    progress.counting("measuring sensitivities", 0, len(auto.units))
    with torch.no_grad():
        room = _room(auto)
        found = streams.measure(skeleton, auto.units, tokens, statistics, solving, room, heard)
    skeleton.model.to("meta")
    if pace.short:
        progress.warn("--search-time: fewer widths were measured of some units than of others")
    measured: dict[str, dict[str, Divergence]] = {unit.name: {} for unit in auto.units}
    for (unit, candidate), divergence in found.items():
        measured[unit][candidate] = divergence
    seconds = time.monotonic() - began
    return Sensitivities(auto.identity, solving.errors, measured, auto.tokens.numel(), seconds)


def _room(auto: Auto) -> int:
    """How many streams fit."""
    skeleton = auto.job.skeleton
    width = skeleton.checkpoint.text_config.hidden_size
    each = auto.tokens.numel() * width * skeleton.dtype.itemsize
    fit = int(STREAMS_SHARE * free_memory(skeleton.device) / each)
    return max(1, min(auto.request.options.search_streams, fit))
