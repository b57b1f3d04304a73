"""The command that starts each engine's server; users can run it in their own shell."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.errors import UNSUPPORTED, require
from quantkit.models import kv_types
from quantkit.serving.server.settings import KEY_VARIABLE, ServeSettings
from quantkit.serving.server.sizing import ServerSize

GIB = 1 << 30
VLLM = "vllm.entrypoints.openai.api_server"
LLAMA_SERVER = "quantkit.serving.engines.llama_server"  # takes llama-server's flags
BLOCK_TOKENS = 256  # default tokens per page of transformers' paged cache
SHARED = (
    "with continuous batching transformers samples all requests as the first request "
    "(--parallel 1: one after the other, each with its own settings)"
)


@dataclass(frozen=True)
class ServerCommand:
    """A command. argv: program and arguments. model: name of the model in requests. env: variables added to
    this process's. secret: (variable from which the engine reads its key, key). notes: for the user."""

    argv: tuple[str, ...]
    model: str
    env: Mapping[str, str] = field(default_factory=dict)
    secret: tuple[str, str] | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """Return the command as one line for a shell. The line names the key's variable, not the key."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        variables += [f'{self.secret[0]}="${KEY_VARIABLE}"'] if self.secret else []
        program = Path(self.argv[0]).name
        on_path = shutil.which(program) == self.argv[0] != sys.executable  # another python lacks the engine
        program = program if on_path else self.argv[0]
        return " ".join([*variables, shlex.join([program, *self.argv[1:]])])

    def environment(self) -> dict[str, str]:
        """Return all environment variables for the engine's process, which imports nothing from the current
        folder."""
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", **self.env}
        variables.pop(KEY_VARIABLE, None)
        return variables | dict([self.secret] if self.secret else [])


def vllm(model: str, name: str, settings: ServeSettings, size: ServerSize) -> ServerCommand:
    """Return the command for vLLM's OpenAI server (GPU or CPU build): https://docs.vllm.ai, `vllm serve`."""
    program = shutil.which("vllm")
    python = Path(program).with_name("python") if program else Path(sys.executable)
    # the CPU build's own `vllm` does not run (0.32: it asks for the version of a package of that name)
    by_module = [str(python), "-m", VLLM, "--model", model]
    argv = [program, "serve", model] if program and not python.exists() else by_module
    argv += ["--served-model-name", name, "--host", settings.host, "--port", str(settings.port)]
    argv += ["--max-model-len", str(size.ctx), "--max-num-seqs", str(size.parallel)]
    argv += ["--dtype", settings.dtype] if settings.dtype != "auto" else []
    if settings.kv_dtype:
        argv += ["--kv-cache-dtype", kv_types.in_engine("vLLM", settings.kv_dtype)]
    argv += ["--trust-remote-code"] * settings.trust_remote_code
    env = {"VLLM_NO_USAGE_STATS": "1"}
    if size.on_cpu:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, -(-(size.cache_bytes or 0) // GIB)))  # whole GiB
    else:
        argv += ["--gpu-memory-utilization", f"{settings.memory_fraction:g}"]
        env |= _visible(settings)
    secret = ("VLLM_API_KEY", settings.api_key) if settings.api_key else None
    return ServerCommand((*argv, *settings.extra), name, env, secret)


def llamacpp(model: str, name: str, settings: ServeSettings, size: ServerSize) -> ServerCommand:
    """Return the command for `llama-server` if it is on the PATH, else for the xllamacpp wheel's server.
    --ctx-size is the context of all sequences together."""
    what = "llama.cpp computes in the types of the file"
    require(settings.dtype == "auto", what, "leave out --dtype", UNSUPPORTED)
    program = shutil.which("llama-server")
    argv = [program] if program else [sys.executable, "-m", LLAMA_SERVER]
    argv += ["--model", model, "--alias", name, "--host", settings.host, "--port", str(settings.port)]
    argv += ["--ctx-size", str(size.ctx * size.parallel), "--parallel", str(size.parallel)]
    if settings.kv_dtype:
        kind = kv_types.in_engine("llama.cpp", settings.kv_dtype)
        argv += ["--cache-type-k", kind, "--cache-type-v", kind]
    argv += ["--n-gpu-layers", "0"] if settings.device == "cpu" else []
    secret = ("LLAMA_API_KEY", settings.api_key) if settings.api_key else None
    return ServerCommand((*argv, *settings.extra), name, _visible(settings), secret)


def transformers(model: str, name: str, settings: ServeSettings, size: ServerSize) -> ServerCommand:
    """Return the command for `transformers serve`, with continuous batching if there are several sequences.
    Requests must name the model by its folder."""
    _refuse_more("transformers serve", settings)
    why = f"transformers serve takes what follows @ or : in {model} for a revision"
    require(not {"@", ":"} & set(model), why, "rename it", UNSUPPORTED)
    sibling = Path(sys.executable).with_name("transformers")
    script = str(sibling) if sibling.exists() else shutil.which("transformers")
    argv = [script] if script else [sys.executable, "-m", "transformers.cli.transformers"]
    argv += ["serve", model, "--host", settings.host, "--port", str(settings.port)]
    argv += ["--device", settings.device] if settings.device != "auto" else []
    argv += ["--dtype", settings.dtype] if settings.dtype != "auto" else []
    argv += ["--trust-remote-code"] * settings.trust_remote_code
    if size.parallel > 1:
        argv += ["--continuous-batching"]
        if size.on_cpu:  # a share of the memory would be nearly all of it
            argv += ["--cb-num-blocks", str(-(-size.cache_tokens // BLOCK_TOKENS))]
        else:
            argv += ["--cb-max-memory-percent", f"{settings.memory_fraction:g}"]
    env = {"HF_HUB_DISABLE_UPDATE_CHECK": "1"}  # else it contacts the package index before it starts
    return ServerCommand((*argv, *settings.extra), model, env, notes=(SHARED,) if size.parallel > 1 else ())


def mlx(model: str, name: str, settings: ServeSettings, size: ServerSize) -> ServerCommand:
    """Return the command for `mlx_lm.server`. Requests must name the model by its folder."""
    _refuse_more("mlx_lm.server", settings)
    why = "mlx_lm.server computes in the type of the model"
    require(settings.dtype == "auto", why, "leave out --dtype", UNSUPPORTED)
    program = shutil.which("mlx_lm.server")
    argv = [program] if program else [sys.executable, "-m", "mlx_lm.server"]
    argv += ["--model", model, "--host", settings.host, "--port", str(settings.port)]
    argv += ["--decode-concurrency", str(size.parallel)]
    argv += ["--trust-remote-code"] * settings.trust_remote_code
    return ServerCommand((*argv, *settings.extra), model)


def _refuse_more(server: str, settings: ServeSettings) -> None:
    """Raise QuantkitError (exit code 4) for an API key or a type of the KV cache."""
    hint = "serve with vllm or llama.cpp, or leave out"
    require(not settings.api_key, f"{server} takes no API key", f"{hint} --api-key", UNSUPPORTED)
    why = f"{server} keeps its cache in the precision of the model"
    require(not settings.kv_dtype, why, f"{hint} --kv-dtype", UNSUPPORTED)


def _visible(settings: ServeSettings) -> dict[str, str]:
    """Return the environment variable that limits the engine to the device of --device."""
    index = settings.device.partition(":")[2]
    return {"CUDA_VISIBLE_DEVICES": index} if index else {}


# by engine: function (path, name in requests, settings, size) -> `ServerCommand`; the default number of
# sequences; whether the cache of all sequences is allocated in advance
SERVERS = {
    "vllm": (vllm, 64, False),
    "llama.cpp": (llamacpp, 4, True),
    "transformers": (transformers, 8, False),
    "mlx": (mlx, 8, False),
}
