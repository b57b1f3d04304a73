"""The table of sensitivities: what the search measures, saved so that another budget costs no search."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quantkit.auto import curve, unit_divergence
from quantkit.auto.curve import Divergence, Errors
from quantkit.auto.job import Auto
from quantkit.auto.solving import Solving
from quantkit.auto.units import Unit, usual
from quantkit.errors import NOT_FOUND, USAGE, QuantkitError, name_all
from quantkit.models.files import atomic, untrusted
from quantkit.quantize.prepare.fingerprint import differences
from quantkit.quantize.progress import Progress

Save = Callable[["Sensitivities"], None]
USUAL = "usual"  # folder of blocks as they are while units are replaced
SCHEMA = "quantkit.sensitivities/2"
ANEW = "leave it out to measure anew"
AMOUNT = {"type": "number", "minimum": 0}
AMOUNTS = {"type": "object", "additionalProperties": AMOUNT}


def _object(**properties: Any) -> dict[str, Any]:
    """The JSON schema of an object with exactly these properties."""
    rest = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **rest}


DIVERGENCE = _object(mean={"type": "number"}, stderr=AMOUNT)
UNIT = _object(
    errors=_object(nearest=AMOUNTS, solved=AMOUNTS | {"minProperties": 1}),
    measured={"type": "object", "additionalProperties": DIVERGENCE},
)
TABLE = _object(
    schema={"const": SCHEMA},
    identity={"type": "object"},
    tokens=AMOUNT,
    seconds=AMOUNT,
    usual={"anyOf": [{"type": "null"}, DIVERGENCE]},
    units={"type": "object", "additionalProperties": UNIT},
)


@dataclass(frozen=True)
class Sensitivities:
    """Of units by their names: errors of all candidates, changes of divergence by those that were measured.
    Of all units, unless the search was interrupted.

    identity: of model, candidates, solver and text: for others they do not hold. tokens, seconds: what
    measuring took.
    """

    identity: dict
    errors: Mapping[str, Errors]
    measured: Mapping[str, Mapping[str, Divergence]]
    tokens: int
    seconds: float
    usual: Divergence | None = None  # of the model in which they were measured

    def losses(self, units: Sequence[Unit]) -> dict[tuple[str, str], float]:
        """What every candidate of every unit adds to the divergence, by their names; all usual ones together
        what was measured of them."""
        found: dict[tuple[str, str], float] = {}
        sums = 0.0
        for unit in units:
            stored = None if unit.block is None else usual(unit).name
            losses = curve.losses(unit, self.errors[unit.name], self.measured[unit.name], stored)
            found |= {(unit.name, name): value for name, value in losses.items()}
            sums += losses[stored] if stored else 0.0
        whole = self.usual.mean if self.usual else 0.0
        share = whole / sums if whole > 0 and sums > 0 else 1.0
        return {key: share * value for key, value in found.items()}

    def missing(self, units: Sequence[Unit]) -> list[Unit]:
        """Those of which nothing is known yet."""
        return [unit for unit in units if unit.name not in self.measured]

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        record = {
            "schema": SCHEMA,
            "identity": self.identity,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "usual": self.usual and asdict(self.usual),
            "units": {
                name: {
                    "errors": asdict(errors),
                    "measured": {key: asdict(one) for key, one in self.measured[name].items()},
                }
                for name, errors in self.errors.items()
            },
        }
        atomic.write_text(path, json.dumps(record, indent=1) + "\n")


def load(path: Path, identity: dict[str, Any], units: Sequence[Unit]) -> Sensitivities:
    """A saved table. Raises QuantkitError where it is none, or not of this model and these options."""
    found = read(path)
    wanted = json.loads(json.dumps(identity))
    if different := differences(found.identity, wanted):
        raise QuantkitError(
            f"{path} holds sensitivities of another search; different: {name_all(different)}",
            "repeat the options of that search, or leave it out to measure anew",
            USAGE,
        )
    for unit in units:
        if unit.name in found.errors and not _covers(found, unit):
            raise QuantkitError(f"{path}: unit {unit.name} lacks candidates", ANEW, USAGE)
    return found


def _covers(table: Sensitivities, unit: Unit) -> bool:
    """Whether the errors of a unit are those of its candidates, and include all that were measured."""
    errors, names = table.errors[unit.name], {one.name for one in unit.candidates}
    needed = table.measured[unit.name].keys() | ({usual(unit).name} if unit.block is not None else set())
    return errors.nearest.keys() == names and needed <= errors.solved.keys() <= names


def read(path: Path) -> Sensitivities:
    """A saved table of whatever search. Raises QuantkitError where it is none."""
    try:
        stored = untrusted.parse(untrusted.read(path))
        json.dumps(stored, allow_nan=False)  # refuses NaN, Infinity and 1e400
    except OSError as error:
        raise QuantkitError(
            f"{path} cannot be read: {error.strerror}", "check the path", NOT_FOUND
        ) from error
    except ValueError:
        stored = None
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        raise QuantkitError(f"{path} is no table of sensitivities", ANEW, USAGE)
    untrusted.check_schema(stored, TABLE, str(path), ANEW)
    rows = stored["units"]
    return Sensitivities(
        stored["identity"],
        {name: Errors(**row["errors"]) for name, row in rows.items()},
        {
            name: {key: Divergence(**one) for key, one in row["measured"].items()}
            for name, row in rows.items()
        },
        stored["tokens"],
        stored["seconds"],
        stored["usual"] and Divergence(**stored["usual"]),
    )


def measure(
    auto: Auto, progress: Progress, known: Sensitivities | None = None, save: Save = lambda table: None
) -> Sensitivities:
    """Measure all units but those that are known. save: is given the table after each walk through the model.

    What is found of a unit does not depend on where an earlier search ended.
    """
    began, prepared = time.monotonic(), auto.job
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
    done = len(auto.units) - len(missing)
    outside = auto.space.outside(prepared, statistics)
    folder = auto.folder / USUAL
    shutil.rmtree(folder, ignore_errors=True)  # of a search that was killed
    folder.mkdir(parents=True)
    solving = Solving(prepared, auto.space, auto.units, outside, folder)

    def heard(unit: Unit) -> None:
        nonlocal done
        done += 1
        progress.counting("measuring sensitivities", done, len(auto.units))

    def table(found: unit_divergence.Found) -> Sensitivities:
        rows: dict[str, dict[str, Divergence]] = {name: {} for name in solving.errors}
        for (unit, candidate), divergence in found.changes.items():
            rows[unit][candidate] = divergence
        return replace(
            known,
            errors={**known.errors, **solving.errors},
            measured={**known.measured, **rows},
            seconds=known.seconds + time.monotonic() - began,
            usual=found.usual,
        )

    progress.counting("measuring sensitivities", done, len(auto.units))
    try:
        with torch.no_grad():
            found = unit_divergence.measure(
                skeleton, missing, tokens, statistics, solving, auto.streams, heard,
                lambda found: save(table(found)),
            )  # fmt: skip
    finally:
        shutil.rmtree(folder)
    skeleton.model.to("meta")
    return table(found)
