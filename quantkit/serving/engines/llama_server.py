"""llama.cpp's server from the xllamacpp wheel, with the flags of its own `llama-server`.

    python -m quantkit.serving.engines.llama_server --model FILE.gguf --port 8080

The wheel holds the server, but no program to start it with. The key comes from LLAMA_API_KEY, as there.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

FLAGS = {  # those of llama-server's that `quantkit serve` gives, by the same names, and their defaults
    "alias": "",
    "host": "127.0.0.1",
    "port": 8080,
    "ctx-size": 0,  # tokens of all sequences together
    "parallel": 1,
    "cache-type-k": "f16",
    "cache-type-v": "f16",
    "n-gpu-layers": -1,
    "threads": 0,
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="llama_server", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a GGUF file")
    for name, default in FLAGS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args(arguments)


def parameters(asked: argparse.Namespace, api_key: str | None = None) -> Any:
    """The same as xllamacpp has them."""
    import xllamacpp

    params, kinds = xllamacpp.CommonParams(), xllamacpp.ggml_type
    params.model.path = asked.model
    if asked.alias:
        params.model_alias = {asked.alias}
    params.hostnames, params.port = [asked.host], asked.port
    params.api_keys = [api_key] if api_key else []
    params.n_ctx, params.n_parallel = asked.ctx_size, asked.parallel
    params.n_gpu_layers = asked.n_gpu_layers
    params.cache_type_k = kinds[f"GGML_TYPE_{asked.cache_type_k.upper()}"]
    params.cache_type_v = kinds[f"GGML_TYPE_{asked.cache_type_v.upper()}"]
    if asked.threads:
        params.cpuparams.n_threads = asked.threads
    return params


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    asked = parse()
    if not Path(asked.model).is_file():
        sys.exit(f"llama_server: no such file: {asked.model}")
    import xllamacpp

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it while it loads, too, whichever thread hears it
    try:
        server = xllamacpp.Server(parameters(asked, os.environ.get("LLAMA_API_KEY")))
    except (RuntimeError, ValueError, KeyError) as error:
        sys.exit(f"llama_server: {error}")
    print(f"llama_server: {server.listening_address}", file=sys.stderr, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
