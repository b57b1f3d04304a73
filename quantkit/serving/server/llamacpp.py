"""llama.cpp's server: its own `llama-server` where that is on the PATH, else the one in the xllamacpp wheel.

The wheel has no command line; `quantkit.serving.engines.llama_server` gives it llama-server's flags.
"""

from __future__ import annotations

import shutil
import sys

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.models import kv_types
from quantkit.serving.server.command import Command
from quantkit.serving.server.settings import Settings
from quantkit.serving.server.sizing import Room

PARALLEL, RESERVES = 4, True
KV_DTYPES = {name: kind.llamacpp for name, kind in kv_types.TYPES.items() if kind.llamacpp}
WHEEL = "quantkit.serving.engines.llama_server"


def command(model: str, name: str, settings: Settings, room: Room) -> Command:
    """model: the GGUF file; name: what requests call it. Its context is that of all sequences together."""
    if settings.dtype != "auto":
        raise QuantkitError(
            "llama.cpp computes as the file is stored",
            "leave out --dtype: its types are in the file",
            UNSUPPORTED,
        )
    program = shutil.which("llama-server")
    argv = [program] if program else [sys.executable, "-m", WHEEL]
    argv += ["--model", model, "--alias", name, "--host", settings.host, "--port", str(settings.port)]
    argv += ["--ctx-size", str(room.ctx * room.parallel), "--parallel", str(room.parallel)]
    if settings.kv_dtype:
        kind = _kv_dtype(settings.kv_dtype)
        argv += ["--cache-type-k", kind, "--cache-type-v", kind]
    argv += ["--n-gpu-layers", "0"] if settings.device == "cpu" else []
    place = settings.device.partition(":")[2]
    env = {"CUDA_VISIBLE_DEVICES": place} if place else {}
    secret = ("LLAMA_API_KEY", settings.api_key) if settings.api_key else None
    return Command((*argv, *settings.extra), name, env, secret)


def _kv_dtype(asked: str) -> str:
    if asked not in KV_DTYPES:
        known = ", ".join(KV_DTYPES)
        raise QuantkitError(
            f"llama.cpp keeps no cache in {asked}", f"--kv-dtype: one of {known}", UNSUPPORTED
        )
    return KV_DTYPES[asked]
