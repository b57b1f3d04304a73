"""Values of options in recipes and Python calls, checked against the types of the options."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from quantkit.errors import USAGE, QuantkitError, did_you_mean, nearest
from quantkit.options import DTYPES, mean_bits

WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}


class Key(NamedTuple):
    """An option by its name in recipes or calls. kind: type of its value. parser: converts a text of it."""

    kind: Any
    help: str
    parser: Callable[[str], Any] | None = None


def keys_of(kind: type) -> dict[str, Key]:
    """Return the options of a dataclass by the names of their fields."""
    hints = get_type_hints(kind)
    given = ((field.name, field.metadata) for field in dataclasses.fields(kind))
    return {name: Key(hints[name], how["help"], how["parser"]) for name, how in given}


def filled(kind: type, values: Mapping[str, Any], origin: str, names: Collection[str] = ()) -> Any:
    """Return an instance of a dataclass of options. names: those that are valid here; none: all.

    Raises QuantkitError for unknown names or wrong types.
    """
    valid = {name: key for name, key in keys_of(kind).items() if name in names or not names}
    texts = {name for name, key in valid.items() if key.kind in (str, str | None)}
    typed = {name: _as_typed(value) if name in texts else value for name, value in values.items()}
    return kind(**checked(origin, typed, valid))


def _as_typed(value: Any) -> Any:
    """Return a number or a list of texts as the text of a flag: 0.5 as "0.5", ["ppl", "kld"] as "ppl,kld"."""
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return ",".join(value)
    return str(value) if type(value) in (int, float) else value


def checked(origin: str, values: Mapping[str, Any], valid: dict[str, Key]) -> dict[str, Any]:
    """Return values converted to the types of their options: integers to floats, lists to tuples, texts to
    paths and paths to texts.

    Raises QuantkitError for unknown keys, or a value of a wrong type.
    """
    refuse_unknown(origin, values, valid)
    converted = {}
    for name, value in values.items():
        key = valid[name]
        if isinstance(value, str | Path):
            value = Path(value) if Path in (key.kind, *get_args(key.kind)) else str(value)
        if isinstance(value, str) and DTYPES.get(value) in _choices(key.kind):
            value = DTYPES[value]
        if isinstance(value, str) and key.parser:
            value = key.parser(value)
        if not _fits(value, key.kind):
            what = f"{origin}: {name} is {value!r}, not {_named(key.kind)}"
            hint = mean_bits(str(value)) if name.endswith("bits") else ""
            hint = hint or did_you_mean(nearest(str(value), _choices(key.kind))) + key.help
            if isinstance(value, str) and get_origin(key.kind) is tuple:
                hint = f"write [{value!r}]. {key.help}"
            raise QuantkitError(what, hint, USAGE)
        value = tuple(value) if isinstance(value, list) else value
        converted[name] = float(value) if key.kind is float else value
    return converted


def refuse_unknown(origin: str, names: Iterable[str], valid: Collection[str]) -> None:
    """Raise QuantkitError naming every unknown key, with similar and valid ones."""
    if unknown := [key for key in names if key not in valid]:
        near = [name for key in unknown for name in _nearest(key, valid)]
        concerned = {key.rpartition(".")[0] for key in unknown}
        listed = [key for key in valid if "" not in concerned and key.rpartition(".")[0] in concerned]
        hint = did_you_mean(near, ", ") + f"valid keys: {', '.join(listed or valid)}"
        raise QuantkitError(f"{origin} has unknown keys: {', '.join(unknown)}", hint, USAGE)


def _nearest(key: str, valid: Iterable[str]) -> list[str]:
    """Return the most similar key or section; [] if none is similar."""
    names = {name.rpartition(".")[2]: name for name in valid}
    names |= {name.partition(".")[0]: name.partition(".")[0] for name in valid}
    last = key.replace("-", "_").rpartition(".")[2]
    return [names[near] for near in nearest(last, names)]


def _fits(value: Any, kind: Any) -> bool:
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return value in parts
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, parts[0]) for item in value)
    if parts:
        return any(_fits(value, part) for part in parts)
    if kind is Path:
        return isinstance(value, Path)
    return type(value) is kind or (kind is float and type(value) is int)


def _choices(kind: Any) -> list[str]:
    return [str(part) for part in get_args(kind)] if get_origin(kind) is Literal else []


def _named(kind: Any) -> str:
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(_choices(kind))
    if get_origin(kind) is tuple:
        return f"a list of {_named(parts[0])}"
    return " or ".join(_named(part) for part in parts if part is not type(None)) if parts else WORDS[kind]
