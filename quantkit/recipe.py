"""Recipes: options in a YAML file. Flags given on the command line win over the recipe."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any

from quantkit.errors import NOT_FOUND, USAGE, QuantkitError
from quantkit.shipped import shipped_folder


def shipped() -> dict[str, Path]:
    """Recipes that come with quantkit, by name."""
    return {path.stem: path for path in sorted(shipped_folder("recipes").glob("*.yaml"))}


def load(name: str, method: str, sections: tuple[type, ...]) -> dict[str, Any]:
    """Options of a shipped recipe or a YAML file, checked against the fields of `sections`.

    Raises QuantkitError for a missing file, another method's recipe, and keys or values that no
    option takes; unknown keys are answered with the valid ones.
    """
    import yaml

    path = shipped().get(name, Path(name))
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise QuantkitError(
            f"no recipe {name}: {error.strerror}",
            hint="shipped recipes: " + ", ".join(shipped()) + "; or give a YAML file",
            exit_code=NOT_FOUND,
        ) from error
    except yaml.YAMLError as error:
        raise QuantkitError(f"{path} is not YAML: {error}", "see recipes/ for examples", USAGE) from error
    if not isinstance(content, dict) or "method" not in content:
        raise QuantkitError(f"{path} names no method", "begin it with 'method: gptq'", USAGE)
    if content.pop("method") != method:
        raise QuantkitError(f"{path} is no recipe for {method}", "run it with its own method", USAGE)
    content.pop("description", None)
    fields = {field.name: field for section in sections for field in dataclasses.fields(section)}
    unknown = [key for key in content if key not in fields]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), fields, 1)
        raise QuantkitError(
            f"{path} has unknown keys: {', '.join(map(str, unknown))}",
            hint=(f"did you mean {near[0]}? " if near else "") + "valid keys: " + ", ".join(fields),
            exit_code=USAGE,
        )
    return {key: _checked(path, fields[key], value) for key, value in content.items()}


def _checked(path: Path, field: dataclasses.Field, value: Any) -> Any:
    """A value of the kind the field's default has (a list where it is a tuple)."""
    default = field.default
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    kind = type(default)
    fits = default is None or isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise QuantkitError(
            f"{path}: {field.name} is {value!r}, which is no {kind.__name__}", field.metadata["help"], USAGE
        )
    return value
