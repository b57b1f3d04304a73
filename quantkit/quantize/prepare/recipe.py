"""Recipes: jobs in YAML files. Flags win over `--set`, `--set` over the recipe, the recipe over defaults.

In this module an option is named by its dotted key, section and field: `quant.bits`, `run.exclude`.
"""

import dataclasses
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.errors import NOT_FOUND, USAGE, QuantkitError, did_you_mean, first_line, nearest, require
from quantkit.models.files import untrusted
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize import methods
from quantkit.quantize.methods import Method
from quantkit.quantize.prepare.request import Request
from quantkit.quantize.prepare.values import Key, checked, keys_of
from quantkit.text import shipped_folder

RECIPE_BYTES = 1 << 20
SHARED = {"calibration": CalibrationOptions, "run": RunOptions}  # sections every method has


ABOUT = {"method": Key(str, "One of the methods."), "description": Key(str, "A line on what it is for.")}
ABOUT |= {"searched": Key(str, "Hash of the search that wrote the recipe. Manifests repeat the hash.")}
PLACES = {
    "model": Key(str | None, "Checkpoint folder, GGUF file or hub id."),
    "output": Key(str | None, "Output folder."),
}


@dataclass(frozen=True)
class Recipe:
    """A loaded recipe. values: dotted key -> checked value, without defaults."""

    method: str
    name: str = ""
    description: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    searched: str = ""


def sections(method: str) -> dict[str, type]:
    """Return the sections of a method's recipes and flags: name -> dataclass of its options."""
    return {"quant": methods.load(method).Options} | SHARED


def keys(method: str) -> dict[str, Key]:
    """Return every key of a recipe of this method that flags and `--set` may change."""
    return PLACES | {
        f"{section}.{name}": key
        for section, kind in sections(method).items()
        for name, key in keys_of(kind).items()
    }


# ---- reading


def shipped() -> dict[str, Path]:
    """Return the recipes shipped with quantkit: name -> path."""
    return {path.stem: path for path in sorted(shipped_folder("recipes").glob("*.yaml"))}


def read(name: str) -> tuple[Path, str]:
    """Return path and text of a shipped recipe or a file. Raises QuantkitError if it does not exist."""
    path = shipped().get(name, Path(name))
    try:
        return path, untrusted.read(path, RECIPE_BYTES).decode("utf-8")
    except OSError as error:
        hint = did_you_mean(nearest(name, shipped()))
        hint += f"shipped recipes: {', '.join(shipped())}; or give a YAML file"
        why = "" if isinstance(error, FileNotFoundError) else f": {error.strerror}"
        raise QuantkitError(f"no recipe {name}{why}", hint, NOT_FOUND) from error
    except UnicodeDecodeError as error:
        raise _not_yaml(str(path), error) from error


def load(name: str, method: str | None = None) -> Recipe:
    """Return a shipped recipe or a YAML file, checked against the options of its method.

    Raises QuantkitError if the file is missing, the recipe is for another method than `method`, or a key or
    value is invalid. For unknown keys, the error lists the valid ones.
    """
    return parse(name, *read(name), method)


def parse(name: str, path: Path | str, text: str, method: str | None = None) -> Recipe:
    """Return the recipe in a YAML text. path: name in messages."""
    content = _parse(str(path), text)
    if not isinstance(content, dict) or "method" not in content:
        raise QuantkitError(f"{path} has no method", "begin it with 'method: gptq'", USAGE)
    named = str(content["method"])
    if method and named != method:
        raise QuantkitError(f"{name} is a recipe for {named}", f"quantkit run {name} MODEL", USAGE)
    try:
        valid = ABOUT | keys(named)
    except QuantkitError as error:
        raise QuantkitError(f"{path}: {error.message}", error.hint, error.exit_code) from error
    flat = {}
    for key, value in content.items():
        if key not in ("quant", *SHARED):
            flat[str(key)] = value
        elif isinstance(value, dict):
            flat |= {f"{key}.{name}": option for name, option in value.items()}
        elif value is not None:
            hint = f"put options under it, two spaces in: see quantkit recipes init {named}"
            raise QuantkitError(f"{path}: {key} is {value!r}, not a section", hint, USAGE)
    values = checked(str(path), flat, valid)
    about = {key: values.pop(key) for key in ABOUT if key in values}
    return Recipe(name=name, values=values, **about)


def _parse(origin: str, text: str) -> Any:
    """Return the content of a YAML text. Raises QuantkitError if a key is given twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads 1e-3 as a number, as YAML 1.2 does, and refuses aliases: a few lines may fill the memory."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.MarkedYAMLError(problem="aliases are not read", problem_mark=mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            names = [key.value for key, _ in node.value]
            if twice := [key for key, _ in node.value if names.count(key.value) > 1]:
                mark = twice[-1].start_mark
                raise yaml.MarkedYAMLError(problem=f"second {twice[-1].value}", problem_mark=mark)
            return super().construct_mapping(node, deep)

    exponent = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except RecursionError as error:
        raise _not_yaml(origin, ValueError("it is nested too deeply")) from error
    except Exception as error:  # PyYAML raises what its constructors run into: of `!!int x`, `2001-99-99`
        raise _not_yaml(origin, error) from error


def _not_yaml(origin: str, error: Exception) -> QuantkitError:
    mark = getattr(error, "problem_mark", None)
    why = f"line {mark.line + 1}: {error.problem}" if mark else first_line(error)
    return QuantkitError(f"{origin} is not YAML: {why}", "see quantkit recipes init", USAGE)


# ---- merging


def merge(recipe: Recipe, settings: Sequence[str], typed: dict[str, Any], **further: Any) -> Request:
    """Merge defaults, recipe, `--set KEY=VALUE` and typed flags (by field name); later ones win. further:
    fields of the Request that are no keys of recipes, such as `resume`."""
    valid = keys(recipe.method)
    flags = {key: typed[name] for key in valid if (name := key.rpartition(".")[2]) in typed}
    values = recipe.values | _settings(settings, valid) | flags
    if values | {"output": None} == recipe.values | {"output": None}:
        further["searched"] = recipe.searched
    if values.get("calibration.calibration") == "shipped":  # its name in manifests and messages
        del values["calibration.calibration"]
    what = f"{recipe.name} has no model"
    require(values.get("model") is not None, what, f"give it: quantkit run {recipe.name} MODEL", USAGE)

    method, options = methods.load(recipe.method), {}
    for name, kind in sections(recipe.method).items():
        given = {field.name: f"{name}.{field.name}" for field in dataclasses.fields(kind)}
        options[name] = kind(**{field: values[key] for field, key in given.items() if key in values})
    output = Path(values["output"]) if values.get("output") is not None else None
    return Request(values["model"], method(options.pop("quant")), output=output, **options, **further)


def method_with(name: str, settings: Sequence[str], flag: str) -> Method:
    """Return a method with default options, changed by settings such as `solver=rtn`. flag: for messages.

    Raises QuantkitError if an option is unknown or a value has the wrong type.
    """
    return methods.create(name, **_settings(settings, keys_of(methods.load(name).Options), flag))


def of_options(method: str, values: Mapping[str, Any]) -> Recipe:
    """Return a recipe from a method's options by the names of their fields, such as bits=4."""
    valid = keys(method)
    full = {key.rpartition(".")[2]: key for key in valid}
    values = checked(method, values, {name: valid[key] for name, key in full.items()})
    return Recipe(method, method, values={full[name]: value for name, value in values.items()})


def _settings(settings: Sequence[str], valid: dict[str, Key], flag: str = "--set") -> dict[str, Any]:
    """Return `["quant.bits=3"]` as `{"quant.bits": 3}`. The section may be omitted: fields are unique."""
    leaves = {key.rpartition(".")[2]: key for key in valid} | {key: key for key in valid}
    values = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        require(equals, f"{flag} {setting} has no value", f"write {flag} {setting}=VALUE", USAGE)
        key = leaves.get(name.strip().replace("-", "_"), name)
        values[key] = _parse(f"{flag} {key}={text}", text)
    return checked(flag, values, valid)


# ---- writing


def template(method: str) -> str:
    """Return a recipe with all of a method's defaults, each below its help text."""
    import yaml

    lines = [
        f"# {methods.load(method).__doc__}",
        "# Run it: quantkit run FILE MODEL. Flags win over --set, --set wins over this file.",
        "# A line left out means its default; relative paths start where quantkit runs.",
        f"method: {method}",
        f"description: All defaults of {method}.",
        *(f"# {name}: {name.upper()}  # {key.help}" for name, key in PLACES.items()),
    ]
    for section, kind in sections(method).items():
        lines += ["", f"{section}:"]
        for option in dataclasses.fields(kind):
            help = textwrap.wrap(option.metadata["help"], 100, break_on_hyphens=False)
            lines += [f"  # {line}" for line in help]
            entered = yaml.safe_dump({option.name: option.default}, default_flow_style=False, width=1000)
            lines.append(textwrap.indent(entered.rstrip("\n"), "  "))
    return "\n".join(lines) + "\n"
