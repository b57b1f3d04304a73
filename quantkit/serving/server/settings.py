"""The flags of `quantkit serve`."""

import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from quantkit.errors import USAGE, QuantkitError, require
from quantkit.models import kv_types
from quantkit.options import check_value, option, parse_tokens

KEY_VARIABLE = "QUANTKIT_API_KEY"  # users, and the printed command, give the API key in this variable


@dataclass(frozen=True)
class ServeSettings:
    """Flags. If one is None, the engine or sizing.py decides. extra: further arguments for the engine."""

    engine: str | None = option(
        None,
        "vllm, llama.cpp, transformers or mlx. (default: the first that is installed and loads the model)",
    )
    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0 for all networks.")
    port: int = option(8000, "Port to listen at; 0 chooses a free port.")
    ctx: int | None = option(
        None,
        "Tokens of a sequence, at most, such as 8192 or 32k. (default: the model's context as far as memory "
        "suffices; at most 8192 on a CPU and with llama.cpp)",
        parser=parse_tokens,
    )
    parallel: int | None = option(
        None,
        "Sequences at once, at most. (default: vllm 64, llama.cpp 4, transformers and mlx 8, if they fit)",
    )
    kv_dtype: str | None = option(
        None,
        "Precision of the KV cache: fp16, bf16, fp8, q8_0 or q4_0; not every engine has all. (default: the "
        "engine's)",
        parser=kv_types.served,
        metavar="TYPE",
    )
    memory_fraction: float = option(0.9, "Share of the free memory for weights and KV cache.")
    device: str = option("auto", "cpu, cuda, cuda:N or mps; auto: the engine's own choice.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Precision of the weights and activations. auto: the checkpoint's own."
    )
    start_timeout: float = option(900.0, "Seconds after which a server that does not answer yet is stopped.")
    trust_remote_code: bool = False
    api_key: str | None = field(default=None, repr=False)
    extra: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise QuantkitError for invalid values."""
        parallel, seconds, share = self.parallel, self.start_timeout, self.memory_fraction
        check_value("--parallel", parallel, parallel is None or parallel >= 1, "choose 1 or more")
        check_value("--start-timeout", seconds, seconds > 0, "choose more than 0 seconds")
        require(0 <= self.port <= 65535, f"--port {self.port} is no port", "0 takes a free one", USAGE)
        check_value("--memory-fraction", share, 0 < share <= 1, "above 0, at most 1")
        valid = (key := self.api_key) is None or (key.strip() and key.isascii() and key.isprintable())
        require(valid, "the API key is empty or not printable ASCII", "give another", USAGE)

    @property
    def is_local(self) -> bool:
        """Return whether `host` is localhost or a loopback address; names are not looked up."""
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    @property
    def reached_at(self) -> str:
        """Return the host to connect to from this machine: localhost's address in place of 0.0.0.0."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]" if ":" in host else host


def free_port(host: str, port: int) -> int:
    """Return `port`, or a free port for 0. Raises QuantkitError if host and port cannot be listened at."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed ones may linger
        try:
            probe.bind((host, port))
        except (OSError, TypeError) as error:  # TypeError: the host is no name
            why = getattr(error, "strerror", None) or error
            hint = "--port 0 takes a free one; --host 127.0.0.1 is always there"
            raise QuantkitError(f"--host {host} --port {port} cannot be used: {why}", hint, USAGE) from error
        return probe.getsockname()[1]
