"""One checkpoint, or two and their differences: what `quantkit inspect` shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quantkit.errors import QuantkitError, of_problems
from quantkit.inspection import record
from quantkit.models.files.headers import open_contents

Listener = Callable[[str, int, int], None]
DAMAGED = "the checkpoint is incomplete or damaged: copy or download it again"


def at(
    path: str, other: str | None, deep: bool, revision: str | None, offline: bool,
    trust_remote_code: bool = False, listen: Listener = lambda what, done, total: None,
) -> tuple[dict[str, Any], QuantkitError | None]:  # fmt: skip
    """Return the JSON of `quantkit inspect`, and an error if a checkpoint is damaged.

    other: a second checkpoint to compare with. deep: read and check all values. revision: of `path`."""
    sources = [(path, revision)] + ([] if other is None else [(other, None)])
    found = [record.describe(open_contents(*source, offline)) for source in sources]
    made, broken = found[0], _problems(found)
    if deep and broken:
        made["integrity"]["notes"] = ["values were not read: the checkpoint is damaged"]
    elif deep or other is not None:
        made = _with_values(sources, found, deep, (offline, trust_remote_code), listen)
        broken = _problems(found)
    return made, of_problems(made, broken, DAMAGED)


def _problems(found: list[dict[str, Any]]) -> list[str]:
    return [problem for model in found for problem in model["integrity"]["problems"]]


def _with_values(
    sources: list[tuple[str, str | None]], found: list[dict[str, Any]], deep: bool,
    options: tuple[bool, bool], listen: Listener,
) -> dict[str, Any]:  # fmt: skip
    """Read values: check those of one checkpoint and return its record, or compare two and return that JSON.

    sources: (name, revision) of each. found: their records. options: offline and trust_remote_code.
    """
    from quantkit.inspection import values
    from quantkit.models.files.open import open_checkpoint

    try:
        opened = [open_checkpoint(*source, *options) for source in sources]
    except QuantkitError as error:
        raise QuantkitError(error.message, error.hint, error.exit_code, found=found[0]) from error
    for checkpoint, model in zip(opened, found, strict=True) if deep else ():
        values.check(checkpoint, model, listen)
    if len(opened) == 1:
        return found[0]
    return values.compare(*opened, (found[0], found[1]), listen)
