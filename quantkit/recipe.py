"""Recipes: options in a YAML file. Flags given on the command line win over the recipe."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

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
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())  # PyYAML draws the place on lines of its own
        raise QuantkitError(f"{path} is not YAML: {why}", "see recipes/ for examples", USAGE) from error
    if not isinstance(content, dict) or "method" not in content:
        raise QuantkitError(f"{path} names no method", "begin it with 'method: gptq'", USAGE)
    if content.pop("method") != method:
        raise QuantkitError(f"{path} is no recipe for {method}", "run it with its own method", USAGE)
    content.pop("description", None)
    fields = {field.name: field for section in sections for field in dataclasses.fields(section)}
    kinds = {name: kind for section in sections for name, kind in get_type_hints(section).items()}
    unknown = [key for key in content if key not in fields]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), fields, 1)
        raise QuantkitError(
            f"{path} has unknown keys: {', '.join(map(str, unknown))}",
            hint=(f"did you mean {near[0]}? " if near else "") + "valid keys: " + ", ".join(fields),
            exit_code=USAGE,
        )
    return {key: _checked(path, fields[key], kinds[key], value) for key, value in content.items()}


def _checked(path: Path, field: dataclasses.Field, kind: Any, value: Any) -> Any:
    """A value as the option of this type takes it: whole numbers are also floats, lists are tuples."""
    if not _fits(value, kind):
        raise QuantkitError(
            f"{path}: {field.name} is {value!r}, which is not {_named(kind)}", field.metadata["help"], USAGE
        )
    if isinstance(value, list):
        return tuple(value)
    return float(value) if kind is float else value


def _fits(value: Any, kind: Any) -> bool:
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return value in parts
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(_fits(item, parts[0]) for item in value)
    if parts:
        return any(_fits(value, part) for part in parts)
    return type(value) is kind or (kind is float and type(value) is int)


def _named(kind: Any) -> str:
    """A type as messages call it."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(parts)
    if get_origin(kind) is tuple:
        return f"a list of {_named(parts[0])}"
    return " or ".join(_named(part) for part in parts if part is not type(None)) if parts else kind.__name__
