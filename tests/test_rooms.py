"""The house: a dozen rooms, and imports that point one way through them (README, "The tree")."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import quantkit

PACKAGE = Path(quantkit.__file__).parent
# From the bottom up: a room imports from itself and from those before it.
ROOMS = (
    "errors", "options", "tables",
    "grids", "layouts", "models", "text", "inspection", "quantize", "evaluation", "distillation", "capacity",
    "auto", "serving", "cli", "api",
)  # fmt: skip


# The same inside a room, for its sub-folders; flat files of a room may import any of them.
FLOORS = {
    "models": ("machine", "files", "skeleton", "gguf"),
    "quantize": ("solvers", "staging", "calibrate", "transforms", "outputs", "methods", "prepare"),
    "evaluation": ("engines", "tasks", "comparison"),
    "serving": ("engines", "chat", "bench", "specdec", "server"),
}
DOORS = {"models.files.open", "models.files.headers"}  # open whatever the user names, a GGUF file as well


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    names = {path: path.relative_to(PACKAGE.parent).with_suffix("").parts for path in PACKAGE.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}


@cache
def imports(path: Path) -> set[str]:
    """What a module imports of the package, inside functions and for type checkers, too."""
    known, found = modules(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quantkit"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("quantkit")}
    return found


def test_imports_point_one_way():
    known = modules()
    rank = {room: place for place, room in enumerate(ROOMS)}
    backwards = [
        f"{module} imports {wanted}"
        for module, path in known.items()
        for wanted in imports(path)
        if module.count(".") and wanted.count(".")
        if rank.get(wanted.split(".")[1], -1) > rank.get(module.split(".")[1], len(ROOMS))
    ]
    assert not backwards


def test_imports_of_sub_folders_point_one_way():
    known, backwards = modules(), []
    for room, floors in FLOORS.items():
        folders = {path.parent.name for path in (PACKAGE / room).glob("*/__init__.py")}
        assert folders == set(floors), room
        rank = {f"quantkit.{room}.{name}": place for place, name in enumerate(floors)}
        floor = {module: rank.get(".".join(module.split(".")[:3])) for module in known}
        backwards += [
            f"{module} imports {wanted}"
            for module, path in known.items()
            for wanted in imports(path)
            if floor[module] is not None and floor.get(wanted) is not None
            if floor[wanted] > floor[module] and module.removeprefix("quantkit.") not in DOORS
        ]
    assert not backwards


def test_no_imports_run_in_a_circle():
    """A package and its own modules count as different."""
    known = modules()
    TopologicalSorter({module: imports(path) - {module} for module, path in known.items()}).prepare()
