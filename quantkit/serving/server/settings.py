"""What a user may ask of a server; None where the engine or the plan decides."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass, field

from quantkit.errors import USAGE, QuantkitError

PORT = 8000
MOST_SLOTS = 4096


@dataclass(frozen=True)
class Settings:
    """engine: by name; ctx: tokens of a sequence; parallel: sequences at once; kv_dtype: of the cache, by
    `capacity.names`; memory_fraction: of the device's memory (of a CPU's, what is free); start_seconds: until
    it must be healthy; extra: further arguments for the engine, as they are."""

    engine: str | None = None
    host: str = "127.0.0.1"
    port: int = PORT
    api_key: str | None = field(default=None, repr=False)
    ctx: int | None = None
    parallel: int | None = None
    kv_dtype: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    memory_fraction: float = 0.9
    trust_remote_code: bool = False
    start_seconds: float = 900.0
    extra: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise QuantkitError for values that make no sense."""
        if not 0 <= self.port <= 65535:
            raise QuantkitError(
                f"--port {self.port} is no port", "choose 1 to 65535, or 0 for a free one", USAGE
            )
        if self.parallel is not None and not 1 <= self.parallel <= MOST_SLOTS:
            raise QuantkitError(
                f"--parallel {self.parallel} makes no sense", f"choose 1 to {MOST_SLOTS:,}", USAGE
            )
        if not 0 < self.memory_fraction <= 1:
            raise QuantkitError(
                f"--memory-fraction {self.memory_fraction:g} makes no sense", "above 0, at most 1", USAGE
            )
        if not 0 < self.start_seconds < 1e6:
            raise QuantkitError(
                f"--start-timeout {self.start_seconds:g} makes no sense", "give seconds, such as 600", USAGE
            )
        if self.api_key is not None and (not self.api_key.strip() or not self.api_key.isascii()):
            raise QuantkitError("the API key is empty or not ASCII", "give another", USAGE)

    @property
    def open(self) -> bool:
        """Whether other machines can reach it."""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True

    @property
    def reached_at(self) -> str:
        """The host that this machine asks: an address for `all of them` is none to connect to."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises QuantkitError where it is in use, or the host is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed ones may linger
        try:
            probe.bind((host, port))
        except PermissionError as error:
            hint = "choose one above 1023, or --port 0 for a free one"
            raise QuantkitError(f"port {port} is not yours to use", hint, USAGE) from error
        except (OSError, OverflowError) as error:
            if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
                hint = "choose 127.0.0.1, 0.0.0.0, or one of this machine's own addresses"
                raise QuantkitError(f"--host {host} is no address of this machine", hint, USAGE) from error
            hint = f"choose another with --port, or 0 for a free one; who has it: lsof -i :{port}"
            raise QuantkitError(f"port {port} of {host} is in use", hint, USAGE) from error
        return probe.getsockname()[1]
