"""The recipe of a choice, and the job of a recipe: what `quantkit run` makes of the file, to the byte."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.auto.options import AutoRequest
from quantkit.quantize import job
from quantkit.quantize.prepare import recipe


def text(request: AutoRequest, method: str, values: Mapping[str, Any], description: str) -> str:
    """The YAML of a recipe. values: by dotted keys, over what the user typed."""
    import yaml

    content: dict[str, Any] = {"method": method, "description": description, "model": request.source}
    for key, value in {**request.typed, **values}.items():
        section, _, name = key.partition(".")
        plain = list(value) if isinstance(value, tuple) else value
        content.setdefault(section, {})[name] = plain
    head = "# Made by quantkit auto; repeat it with: quantkit run FILE\n"
    return head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)


def request_of(request: AutoRequest, written: str, output: Path, overwrite: bool = True) -> job.Request:
    """The job of a recipe's text, as `quantkit run` reads it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "recipe.yaml"
        place.write_text(written, encoding="utf-8")
        choice = recipe.merge(recipe.load(str(place)), (), {})
    return job.Request(
        source=choice.model,
        method=choice.method,
        options=choice.options,
        calibration=choice.calibration,
        run=choice.run,
        output=output,
        revision=request.revision,
        offline=request.offline,
        trust_remote_code=request.trust_remote_code,
        resume=output.with_name(f"{output.name}.partial").exists(),
        overwrite=overwrite,
    )
