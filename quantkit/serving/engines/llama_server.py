"""llama.cpp's server from the xllamacpp wheel, with the flags of its own `llama-server`.

    python -m quantkit.serving.engines.llama_server --model FILE.gguf --port 8080

The wheel contains the server but no program to start it. LLAMA_API_KEY sets the key, as in `llama-server`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

FLAGS = {  # flags of llama-server that `quantkit serve` gives: names in xllamacpp, and defaults
    "port": ("port", 8080),
    "ctx-size": ("n_ctx", 0),  # tokens of all sequences together
    "parallel": ("n_parallel", 1),
    "n-gpu-layers": ("n_gpu_layers", -1),
}
TYPES = {"cache-type-k": "cache_type_k", "cache-type-v": "cache_type_v"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="llama_server", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--alias", required=True, help="the name that requests give")
    parser.add_argument("--host", default="127.0.0.1")
    for flag, (name, default) in FLAGS.items():
        parser.add_argument(f"--{flag}", dest=name, type=int, default=default)
    for flag, name in TYPES.items():
        parser.add_argument(f"--{flag}", dest=name, default="f16")
    return parser.parse_args(arguments)


def parameters(options: argparse.Namespace, api_key: str | None = None) -> Any:
    """Return xllamacpp's settings for the flags."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias, params.hostnames = options.model, {options.alias}, [options.host]
    params.api_keys = [api_key] if api_key else []
    for name, _ in FLAGS.values():
        setattr(params, name, getattr(options, name))
    for name in TYPES.values():
        setattr(params, name, xllamacpp.ggml_type[f"GGML_TYPE_{getattr(options, name).upper()}"])
    return params


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    options = parse()
    if not Path(options.model).is_file():
        sys.exit(f"llama_server: no such file: {options.model}")
    import xllamacpp

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the server while it loads, in any thread
    try:
        server = xllamacpp.Server(parameters(options, os.environ.get("LLAMA_API_KEY")))
    except (RuntimeError, ValueError, KeyError) as error:
        sys.exit(f"llama_server: {error}")
    print(f"llama_server: {server.listening_address}", file=sys.stderr, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
