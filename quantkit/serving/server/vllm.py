"""vLLM's OpenAI server, of its GPU or its CPU build: https://docs.vllm.ai, `vllm serve` by its module."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.models import kv_types
from quantkit.serving.server.command import Command
from quantkit.serving.server.settings import Settings
from quantkit.serving.server.sizing import Room

PARALLEL, RESERVES = 64, False
KV_DTYPES = {name: kind.vllm for name, kind in kv_types.TYPES.items() if kind.vllm}
GIB = 1 << 30
MODULE = "vllm.entrypoints.openai.api_server"


def command(model: str, name: str, settings: Settings, room: Room) -> Command:
    """model: the folder; name: what requests call it."""
    argv = [*_start(model), "--served-model-name", name]
    argv += ["--host", settings.host, "--port", str(settings.port)]
    argv += ["--max-model-len", str(room.ctx), "--max-num-seqs", str(room.parallel)]
    argv += ["--dtype", settings.dtype] if settings.dtype != "auto" else []
    argv += ["--kv-cache-dtype", _kv_dtype(settings.kv_dtype)] if settings.kv_dtype else []
    argv += ["--trust-remote-code"] * settings.trust_remote_code
    env = {"VLLM_NO_USAGE_STATS": "1"}
    if room.memory.kind == "cpu":
        env["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, -(-(room.cache_bytes or 0) // GIB)))  # whole GiB
    else:
        argv += ["--gpu-memory-utilization", f"{settings.memory_fraction:g}"]
        place = settings.device.partition(":")[2]
        env |= {"CUDA_VISIBLE_DEVICES": place} if place else {}
    secret = ("VLLM_API_KEY", settings.api_key) if settings.api_key else None
    return Command((*argv, *settings.extra), name, env, secret)


def _start(model: str) -> list[str]:
    """The server's module by the Python of vLLM's environment: the CPU build's own `vllm` does not run (0.32:
    it asks for the version of a package of that name)."""
    program = shutil.which("vllm")
    if program is None:
        return [sys.executable, "-m", MODULE, "--model", model]
    python = Path(program).with_name("python")
    return [str(python), "-m", MODULE, "--model", model] if python.exists() else [program, "serve", model]


def _kv_dtype(asked: str) -> str:
    if asked not in KV_DTYPES:
        known = ", ".join(KV_DTYPES)
        raise QuantkitError(f"vLLM keeps no cache in {asked}", f"--kv-dtype: one of {known}", UNSUPPORTED)
    return KV_DTYPES[asked]
