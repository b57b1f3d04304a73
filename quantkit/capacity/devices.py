"""Devices by name: memory, bandwidth, and FLOPS of dense matrix products (devices.json); the roofline.

A row of devices.json: GiB, GB/s, TFLOPS in 16 bit; then TFLOPS in each type of FEWER that the device has.
NVIDIA and AMD: data sheets; dense products that accumulate in float32 (int8: in int32); memory as the driver
shows it; rtx-pro-6000 is the Blackwell Workstation Edition. Apple: the full chip with the most memory sold;
bandwidth as stated; FLOPS of the GPU in float32 (16 bit is no faster), computed by others from clock rates.
`cpu` is this machine: its free memory, and a benchmark.

The roofline of decoding (Williams, Waterman, Patterson 2009): a step reads every weight once and uses it in
one multiplication and one addition per sequence:

    memory time  = weights · bytes_per_weight / bandwidth
    compute time = 2 · weights · batch / FLOPS

They are equal at `batch = FLOPS · bytes_per_weight / (2 · bandwidth)`. Below this batch size, a further
sequence takes no time; above, the time grows with each sequence.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from quantkit.capacity import speed as speeds
from quantkit.errors import USAGE, QuantkitError, did_you_mean
from quantkit.models.machine import processor

GIB = 1 << 30
FEWER = ("int8", "fp8", "fp4")


@dataclass(frozen=True)
class Device:
    """A device, or several counted as one. Unknown numbers are None.

    kind: cuda, rocm, apple or cpu. memory_gib: GiB. bandwidth_gbs: GB/s. tflops: TFLOPS in 16 bit. fewer:
    TFLOPS by type, for types with fewer bits that the device supports. count: number of devices.
    """

    name: str
    kind: str
    memory_gib: float | None
    bandwidth_gbs: float | None
    tflops: float | None
    fewer: Mapping[str, float] = field(default_factory=dict, hash=False)
    count: int = 1

    def peak(self, computes: str) -> float | None:
        """Return the TFLOPS in a type such as `int8`; in 16 bit if the device does not support the type."""
        return self.fewer.get(computes, self.tflops)

    def times(self, count: int) -> Device:
        """Return `count` such devices as one, with the sum of memory, bandwidth and FLOPS: an upper bound."""
        if count == 1:
            return self
        numbers = {key: getattr(self, key) for key in ("memory_gib", "bandwidth_gbs", "tflops")}
        numbers = {key: value and value * count for key, value in numbers.items()}
        fewer = {name: value * count for name, value in self.fewer.items()}
        return replace(self, name=f"{count} × {self.name}", count=count, fewer=fewer, **numbers)

    @property
    def usable(self) -> float:
        """Return the share of memory for weights and cache: vLLM's default; on Apple, macOS's GPU limit."""
        return 0.75 if self.kind == "apple" else 0.9

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_gib is None else round(self.memory_gib * GIB)


TABLE = json.loads(Path(__file__).with_name("devices.json").read_text(encoding="utf-8"))
DEVICES = {
    name: Device(name, kind, *numbers[:3], dict(zip(FEWER, numbers[3:], strict=False)))
    for kind, rows in TABLE.items()
    for name, numbers in rows.items()
}
MEMORY = re.compile(r"\d+g$")
MEANINGLESS = re.compile(  # words of drivers that do not distinguish two devices of the table
    r"\b(nvidia|geforce|tesla|amd|instinct|apple|generation|(sxm|hbm)\w*"
    r"|blackwell( (workstation|server) edition)?)\b"
)


def this_machine(threads: int) -> Device:
    """Return this machine's processor, with the memory that is free."""
    from quantkit.models.machine import memory

    speed = speeds.of_machine("bfloat16" if processor.has_bfloat16() else "float32").with_threads(threads)
    return Device("cpu", "cpu", memory.room().nbytes / GIB, 1e-9 / speed.byte, 2e-12 / speed.product)


def find(name: str) -> Device:
    """Return the device with this name; `rtx-3090`, `RTX 3090` and `NVIDIA GeForce RTX 3090` are the same.
    For an unknown name, raises QuantkitError that lists similar ones."""
    requested = {*_words(name)} - {"rtx"}
    words = {device: {*_words(device)} - {"rtx"} for device in DEVICES}
    near = [device for device in DEVICES if {w for w in words[device] if not MEMORY.match(w)} == requested]
    exact = [device for device in DEVICES if words[device] == requested]
    exact = exact or [device for device in DEVICES if words[device] == requested - {"pcie"}]
    if matches := exact or (near if len(near) == 1 else []):
        return DEVICES[matches[0]]
    near = near or difflib.get_close_matches("-".join(_words(name)), DEVICES, 3, 0.5)
    hint = f"{did_you_mean(near)}known: {', '.join(DEVICES)}; or give --vram, --bandwidth and --tflops"
    raise QuantkitError(f"unknown device {name!r}", hint, USAGE)


def _words(name: str) -> list[str]:
    """Return the words that distinguish a device name, in lower case; `80 GiB` becomes `80g`."""
    spelled = re.sub(r"[\s_-]+", " ", name.lower())
    spelled = re.sub(r"(\d+) ?gi?b\b", r"\1g", spelled)
    spelled = re.sub(r"\brtx(?=\d)|(?<=\d)(?=ti\b)", lambda match: f"{match[0]} ", spelled)
    return MEANINGLESS.sub(" ", spelled).split()


def optimal_batch(flops: float, bandwidth: float, bytes_per_weight: float) -> float:
    """Return the batch size at which reading the weights takes as long as computing with them. flops:
    operations per second. bandwidth: bytes per second."""
    return flops * bytes_per_weight / (2 * bandwidth)
