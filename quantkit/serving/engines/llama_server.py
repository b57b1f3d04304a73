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


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags of llama-server that `quantkit serve` gives."""
    parser = argparse.ArgumentParser(prog="llama_server", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--alias", required=True, help="the name that requests give")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--ctx-size", type=int, default=0, help="tokens of all sequences together")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--n-gpu-layers", type=int, default=-1)
    parser.add_argument("--cache-type-k", default="f16")
    parser.add_argument("--cache-type-v", default="f16")
    return parser.parse_args(arguments)


def parameters(options: argparse.Namespace, api_key: str | None = None) -> Any:
    """Return xllamacpp's settings for the flags."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = options.model, {options.alias}
    params.hostnames, params.port = [options.host], options.port
    params.api_keys = [api_key] if api_key else []
    params.n_ctx, params.n_parallel = options.ctx_size, options.parallel
    params.n_gpu_layers = options.n_gpu_layers
    params.cache_type_k = xllamacpp.ggml_type[f"GGML_TYPE_{options.cache_type_k.upper()}"]
    params.cache_type_v = xllamacpp.ggml_type[f"GGML_TYPE_{options.cache_type_v.upper()}"]
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
