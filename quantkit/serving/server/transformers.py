"""`transformers serve`, with continuous batching over a paged cache where sequences run side by side."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.serving.server.command import Command
from quantkit.serving.server.settings import Settings
from quantkit.serving.server.sizing import Room

PARALLEL, RESERVES = 8, False
PAGE = 256  # tokens of a block, by default
SHARED = (
    "with continuous batching transformers samples as its first request asks, whatever later ones ask "
    "(--parallel 1: one after the other, each as it asks)"
)


def command(model: str, name: str, settings: Settings, room: Room) -> Command:
    """model: the folder, which is also what requests must call it."""
    _refuse(model, settings)
    beside = Path(sys.executable).with_name("transformers")
    script = str(beside) if beside.exists() else shutil.which("transformers")
    argv = [script] if script else [sys.executable, "-m", "transformers.cli.transformers"]
    argv += ["serve", model, "--host", settings.host, "--port", str(settings.port)]
    argv += ["--device", settings.device] if settings.device != "auto" else []
    argv += ["--dtype", settings.dtype] if settings.dtype != "auto" else []
    argv += ["--trust-remote-code"] * settings.trust_remote_code
    notes = []
    if room.parallel > 1:
        argv += ["--continuous-batching"]
        argv += _cache(settings, room)
        notes.append(SHARED)
    env = {"HF_HUB_DISABLE_UPDATE_CHECK": "1"}  # it would ask the package index before it starts
    return Command((*argv, *settings.extra), model, env, notes=tuple(notes))


def _cache(settings: Settings, room: Room) -> list[str]:
    """The share of an accelerator's memory; on a CPU, where it would take nearly all, so many blocks."""
    if room.memory.kind != "cpu":
        return ["--cb-max-memory-percent", f"{settings.memory_fraction:g}"]
    return ["--cb-num-blocks", str(-(-room.cache_tokens // PAGE))]


def _refuse(model: str, settings: Settings) -> None:
    if settings.api_key:
        raise QuantkitError(
            "transformers serve takes no API key: whoever reaches the port is served",
            hint="leave out --api-key and keep it on 127.0.0.1, or serve with vllm or llama.cpp",
            exit_code=UNSUPPORTED,
        )
    if settings.kv_dtype:
        raise QuantkitError(
            "transformers serve keeps its cache in the precision of the model",
            hint="leave out --kv-dtype, or serve with vllm or llama.cpp",
            exit_code=UNSUPPORTED,
        )
    if "@" in model or ":" in model:
        raise QuantkitError(
            f"transformers serve takes what follows @ or : in {model} for a revision or a file",
            hint="give the folder another name",
            exit_code=UNSUPPORTED,
        )
