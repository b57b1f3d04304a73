"""llama.cpp's server from the xllamacpp wheel, with the flags of its own `llama-server`.

    python -m quantkit.serving.engines.llama_server --model FILE.gguf --alias NAME --port 8080

The wheel contains the server but no program to start it. LLAMA_API_KEY sets the key, as in `llama-server`.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def serve(
    model: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="A GGUF file.")],
    alias: Annotated[str, typer.Option(help="The name that requests give.")],
    host: str = "127.0.0.1",
    port: int = 8080,
    ctx_size: Annotated[int, typer.Option(help="Tokens of all sequences together.")] = 0,
    parallel: int = 1,
    n_gpu_layers: int = -1,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
) -> None:
    """Serve a GGUF file with llama.cpp until SIGINT or SIGTERM."""
    import xllamacpp

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the server while it loads, in any thread
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = str(model), {alias}
    params.hostnames, params.port = [host], port
    params.api_keys = [os.environ["LLAMA_API_KEY"]] if os.environ.get("LLAMA_API_KEY") else []
    params.n_ctx, params.n_parallel, params.n_gpu_layers = ctx_size, parallel, n_gpu_layers
    try:
        params.cache_type_k = xllamacpp.ggml_type[f"GGML_TYPE_{cache_type_k.upper()}"]
        params.cache_type_v = xllamacpp.ggml_type[f"GGML_TYPE_{cache_type_v.upper()}"]
        server = xllamacpp.Server(params)
    except (RuntimeError, ValueError, KeyError) as error:
        sys.exit(f"llama_server: {error}")
    print(f"llama_server: {server.listening_address}", file=sys.stderr, flush=True)
    signal.pause()


if __name__ == "__main__":
    app()
