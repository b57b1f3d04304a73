"""Processes by their numbers: whether one lives or computes, and how it is ended. A number means something
only where it was given, so whoever tells one to others says where that is."""

from __future__ import annotations

import os
import signal
import socket
from functools import cache
from pathlib import Path

import psutil

BOOT = Path("/proc/sys/kernel/random/boot_id")  # Linux alone, as are namespaces
NAMESPACE = Path("/proc/self/ns/pid")


@cache
def place() -> str:
    """Who sees the same processes under the same numbers. A host's name alone does not tell: images of
    machines share one, and containers of a host may, which have processes of their own."""
    try:
        return f"{socket.gethostname()} {BOOT.read_text().strip()} {os.readlink(NAMESPACE)}"
    except OSError:
        return socket.gethostname()


def lives(pid: int) -> bool:
    """Whether it is there, and more than a record of how it ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def seconds(pid: int) -> float | None:
    """What it has had of the processor; None where it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return times.user + times.system


def end(pid: int) -> None:
    """At once: one that hangs does not end when it is asked to."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
