"""The JSON of `quantkit inspect`: one checkpoint, or two and their differences."""

from typing import Any

from quantkit.errors import QuantkitError
from quantkit.inspection import record
from quantkit.models.files.headers import open_contents


def at(
    path: str, other: str | None = None, deep: bool = False, revision: str | None = None,
    offline: bool = True, trust_remote_code: bool = False, listen: Any = lambda what, done, total: None,
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """Return the JSON of `quantkit inspect`, and the problems of damaged checkpoints. other: a second
    checkpoint to compare with. deep: read and check all values. revision: of `path`."""
    sources = [(path, revision)] + ([] if other is None else [(other, None)])
    contents = [open_contents(*source, offline) for source in sources]
    records = [record.describe(headers) for headers in contents]
    made = records[0]
    if deep and (damaged := [model for model in records if model["integrity"]["problems"]]):
        made = damaged[0]
        made["integrity"]["notes"] = ["values were not read: the checkpoint is damaged"]
    elif deep or other is not None:
        from quantkit.inspection import values
        from quantkit.models.files.open import open_checkpoint

        try:
            opened = [open_checkpoint(*source, offline, trust_remote_code) for source in sources]
        except QuantkitError as error:
            raise QuantkitError(error.message, error.hint, error.exit_code, found=made) from error
        for checkpoint, model in zip(opened, records, strict=True) if deep else ():
            values.check(checkpoint, model, listen)
        if other is not None:
            made = values.compare(*opened, records, [record.written(headers) for headers in contents], listen)
    return made, [problem for model in records for problem in model["integrity"]["problems"]]
