"""The table of sensitivities: measured once, saved, and reused for other budgets."""

import itertools
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.auto import unit_divergence
from quantkit.auto.job import Auto
from quantkit.auto.solving import Solving
from quantkit.auto.units import Row, Unit, measured, unit_losses, usual
from quantkit.errors import USAGE, QuantkitError, name_all, require, unreadable
from quantkit.models.files import atomic, untrusted
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.fingerprint import differences

MEASURING = "measuring sensitivities"
USUAL = "usual"  # folder of the usual weights of blocks
SCHEMA = "quantkit.sensitivities/3"
ANEW = "leave out --sensitivities to measure anew"


@dataclass(frozen=True)
class Sensitivities:
    """The table. units: rows by unit name; after an interruption, of some units only.

    identity: model, candidates, solver and text. tokens: number of tokens measured on. seconds: time taken.
    usual: divergence of the model in which all units have their usual candidates.
    """

    identity: dict
    tokens: int
    seconds: float
    usual: dict[str, float] | None
    units: Mapping[str, Row]

    def losses(self, units: Sequence[Unit]) -> dict[tuple[str, str], float]:
        """Return {(unit, candidate): added divergence}, scaled such that the sum over the usual candidates is
        their measured divergence."""
        by_candidate: dict[tuple[str, str], float] = {}
        sums = 0.0
        for unit in units:
            losses = unit_losses(unit, self.units[unit.name])
            by_candidate |= {(unit.name, name): value for name, value in losses.items()}
            sums += losses[usual(unit)] if unit.block is not None else 0.0
        whole = self.usual["mean"] if self.usual else 0.0
        share = whole / sums if whole > 0 and sums > 0 else 1.0
        return {key: share * value for key, value in by_candidate.items()}

    def missing(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the units without a row."""
        return [unit for unit in units if unit.name not in self.units]

    def save(self, path: Path) -> None:
        """Write the table atomically."""
        with atomic.replacing(path) as file:
            file.write_text(json.dumps({"schema": SCHEMA} | asdict(self), indent=1) + "\n", encoding="utf-8")


def load(path: Path | None, identity: dict[str, Any], units: Sequence[Unit]) -> Sensitivities | None:
    """Read a table, if it is saved. Raises QuantkitError if it is invalid or of another model or options."""
    if not (path and path.exists()):
        return None
    table = read(path)
    different = differences(table.identity, identity)
    what = f"{path} holds sensitivities of another search; different: {name_all(different)}"
    require(not different, what, f"repeat the options of that search, or {ANEW}", USAGE)
    for unit in units:
        if row := table.units.get(unit.name):
            names = set(unit.candidates)
            needed = {measured(unit), usual(unit)}
            nearest, solved = (row["errors"][kind].keys() for kind in ("nearest", "solved"))
            if nearest != names or not needed <= solved <= names:
                raise QuantkitError(f"{path}: unit {unit.name} lacks candidates", ANEW, USAGE)
    return table


def read(path: Path) -> Sensitivities:
    """Read a saved table of any search. Raises QuantkitError if the file is not a valid table."""
    try:
        stored = untrusted.parse(untrusted.read(path))
        json.dumps(stored, allow_nan=False)  # refuses NaN, Infinity and 1e400
    except OSError as error:
        raise unreadable(path, error, "check the path") from error
    except ValueError:
        stored = None
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        raise QuantkitError(f"{path} is not a table of sensitivities", ANEW, USAGE)
    schema = Path(__file__).with_name("sensitivities.schema.json").read_text(encoding="utf-8")
    untrusted.check_schema(stored, json.loads(schema), str(path), ANEW)
    return Sensitivities(**{name: value for name, value in stored.items() if name != "schema"})


def measure(auto: Auto, progress: Progress, saved: Sensitivities | None = None) -> Iterator[Sensitivities]:
    """Measure all units that have no row in `saved`. Yield the table after each walk through the model, the
    complete table last. A unit's row is the same whether or not the search was interrupted."""
    began, job = time.monotonic(), auto.job
    saved = saved or Sensitivities(auto.identity, auto.tokens.numel(), 0.0, None, {})
    missing = saved.missing(auto.units)
    skeleton = job.skeleton
    skeleton.streams = False  # a block's experts are replaced together
    progress.phase("loading")
    skeleton.load_rest()
    batch_size = job.plan.execution.batch_size
    tokens, statistics = auto.tokens.split(batch_size), auto.statistics.split(batch_size)
    total = unit_divergence.steps(auto.units, skeleton.depth)
    done = itertools.count(total - unit_divergence.steps(missing, skeleton.depth))
    folder = auto.staging.folder / USUAL
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed search
    folder.mkdir(parents=True)
    solving = Solving(auto, statistics, folder)

    def report() -> None:
        progress.counting(MEASURING, next(done), total)

    progress.phase(MEASURING)
    compared = partial(progress.counting, "comparing predictions")
    inputs = skeleton, missing, tokens, statistics, solving, auto.streams, report, compared
    try:
        for of_usual, changes in unit_divergence.measure(*inputs):
            rows = {
                name: {"errors": solving.errors[name], "divergence": divergence}
                for name, divergence in changes.items()
            }
            seconds = saved.seconds + time.monotonic() - began
            yield replace(saved, units={**saved.units, **rows}, seconds=seconds, usual=of_usual)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    skeleton.free()
