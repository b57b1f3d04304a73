"""Devices by name: memory, bandwidth, and FLOPS of dense matrix products, of 16 bit and of fewer.

NVIDIA: data sheets, tensor cores that add up in float32 (int8: in int32), without sparsity; memory as the
driver shows it (rtx-pro-6000 is the Blackwell Workstation Edition). AMD: data sheets, matrix cores, likewise.
Apple: the full chip with the most memory sold, bandwidth as stated, FLOPS of its GPU in float32 (16 bit is
no faster there) as others computed them from clocks. `cpu` is a desktop of eight cores and two channels of
DDR5-5600. Say --vram, --bandwidth and --tflops for another.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from quantkit.errors import USAGE, QuantkitError

GIB = 1 << 30
MOST_DEVICES = 10_000


@dataclass(frozen=True)
class Device:
    """memory_gib: of it `usable` may be filled; bandwidth in GB/s, tflops in 10^12 operations a second.

    tflops are those of 16 bit; fewer: of types with fewer, `int8`, `fp8` and `fp4`, where it multiplies in
    these. kind: cuda, rocm, apple or cpu. None: not known. count: devices that stand here for one, `single`.
    """

    name: str
    kind: str
    memory_gib: float | None
    bandwidth_gbs: float | None
    tflops: float | None
    fewer: Mapping[str, float] = field(default_factory=dict, hash=False)
    count: int = 1
    single: Device | None = None

    @property
    def one(self) -> Device:
        """One of them."""
        return self.single or self

    def peak(self, computes: str) -> float | None:
        """10^12 operations a second in a type; those of 16 bit where products are made in these."""
        return self.fewer.get(computes, self.tflops)

    def times(self, count: int) -> Device:
        """So many of them as if they were one: all memory, bandwidth and FLOPS, which is an upper bound."""
        if count == 1:
            return self
        known = {
            key: value * count
            for key in ("memory_gib", "bandwidth_gbs", "tflops")
            if (value := getattr(self, key)) is not None
        }
        known["fewer"] = {name: value * count for name, value in self.fewer.items()}
        return replace(self, name=f"{count} × {self.name}", count=count, single=self, **known)

    @property
    def usable(self) -> float:
        """Share of the memory for weights and cache: vLLM's default, and macOS's limit for its GPU."""
        return 0.75 if self.kind == "apple" else 0.9

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_gib is None else round(self.memory_gib * GIB)


FEWER = ("int8", "fp8", "fp4")
# GiB, GB/s, TFLOPS of 16 bit; then those of FEWER, as far as it multiplies in these
_CUDA = {
    "v100-16g": (16, 900, 125),
    "v100-32g": (32, 900, 125),
    "t4": (15, 320, 65, 130),
    "a10": (22.5, 600, 125, 250),
    "a10g": (22.5, 600, 70, 140),
    "a100-40g": (40, 1555, 312, 624),
    "a100-80g": (80, 2039, 312, 624),
    "a6000": (48, 768, 155, 310),
    "h100-80g": (80, 3350, 989, 1979, 1979),
    "h100-pcie-80g": (80, 2000, 756, 1513, 1513),
    "h20": (95, 4000, 148, 296, 296),
    "h200": (140, 4800, 989, 1979, 1979),
    "b200": (179, 8000, 2250, 4500, 4500, 9000),
    "l4": (22.5, 300, 121, 242, 242),
    "l40": (45, 864, 181, 362, 362),
    "l40s": (45, 864, 362, 733, 733),
    "rtx-3060": (12, 360, 25, 102),
    "rtx-3080": (10, 760, 59.5, 238),
    "rtx-3090": (24, 936, 71, 284),
    "rtx-4070": (12, 504, 58.3, 233, 117),
    "rtx-4070-ti": (12, 504, 80.2, 321, 160),
    "rtx-4080": (16, 717, 97.5, 390, 195),
    "rtx-4090": (24, 1008, 165, 661, 330),
    "rtx-5090": (32, 1792, 209, 838, 419, 1676),
    "rtx-6000-ada": (48, 960, 364, 728, 728),
    "rtx-pro-6000": (95, 1792, 503, 1008, 1008, 2015),
}
_ROCM = {"mi300x": (191, 5300, 1307, 2615, 2615)}
_APPLE = {
    "m1": (16, 68, 2.6),
    "m1-pro": (32, 200, 5.2),
    "m1-max": (64, 400, 10.4),
    "m1-ultra": (128, 800, 20.8),
    "m2": (24, 100, 3.6),
    "m2-pro": (32, 200, 6.8),
    "m2-max": (96, 400, 13.5),
    "m2-ultra": (192, 800, 27),
    "m3": (24, 100, 3.5),
    "m3-pro": (36, 150, 6.4),
    "m3-max": (128, 400, 14.3),
    "m3-ultra": (512, 819, 28.6),
    "m4": (32, 120, 4.3),
    "m4-pro": (64, 273, 8.6),
    "m4-max": (128, 546, 17.2),
}
DEVICES = {
    name: Device(name, kind, *numbers[:3], dict(zip(FEWER, numbers[3:], strict=False)))
    for kind, table in (("cuda", _CUDA), ("rocm", _ROCM), ("apple", _APPLE), ("cpu", {"cpu": (32, 90, 1)}))
    for name, numbers in table.items()
}

MEMORY = re.compile(r"\d+g$")
MEANINGLESS = re.compile(  # words of drivers that tell no two of these devices apart
    r"\b(nvidia|geforce|tesla|amd|instinct|apple|generation|(sxm|hbm)\w*"
    r"|blackwell( (workstation|server) edition)?)\b"
)


def find(name: str) -> Device:
    """The device a user or a driver names: `RTX 3090` and `NVIDIA GeForce RTX 3090` as well as `rtx-3090`.

    Raises QuantkitError with the nearest names for an unknown one.
    """
    wanted = _tokens(name)
    tokens = {known: _tokens(known) for known in DEVICES}
    without_memory = {known: {t for t in some if not MEMORY.match(t)} for known, some in tokens.items()}
    near = [known for known, some in without_memory.items() if some == wanted]
    exact = [known for known, some in tokens.items() if some in (wanted, wanted - {"pcie"})]
    if found := exact or (near if len(near) == 1 else []):
        return DEVICES[found[0]]
    near = near or difflib.get_close_matches("-".join(_words(name)), DEVICES, 3, 0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise QuantkitError(
        f"no device {name!r}",
        hint=f"{meant}known: {', '.join(DEVICES)}; or say --vram, --bandwidth and --tflops",
        exit_code=USAGE,
    )


def _words(name: str) -> list[str]:
    """The words of a name that tell one device from another, in lower case; `80 GiB` is `80g`."""
    spelled = re.sub(r"[\s_-]+", " ", name.lower())
    spelled = re.sub(r"(\d+) ?gi?b\b", r"\1g", spelled)
    spelled = re.sub(r"\brtx(?=\d)|(?<=\d)(?=ti\b)", lambda found: f"{found[0]} ", spelled)
    return MEANINGLESS.sub(" ", spelled).split()


def _tokens(name: str) -> set[str]:
    return set(_words(name)) - {"rtx"}


def choose(
    name: str | None,
    vram: float | None,
    bandwidth: float | None,
    tflops: float | None,
    count: int | None = None,
) -> Device | None:
    """The named device with what is said otherwise put in its place; None where nothing is said.

    vram in GiB, bandwidth in GB/s, all of one device; count: how many there are. Raises QuantkitError for
    numbers that are not positive, and for a count of nothing.
    """
    said = {"memory_gib": vram, "bandwidth_gbs": bandwidth, "tflops": tflops}
    flags = {"memory_gib": "--vram", "bandwidth_gbs": "--bandwidth", "tflops": "--tflops"}
    said = {key: value for key, value in said.items() if value is not None}
    for key, value in said.items():
        if not 0 < value < 1e9:
            raise QuantkitError(f"{flags[key]} {value:g} makes no sense", "give a positive number", USAGE)
    if count is not None and not 1 <= count <= MOST_DEVICES:
        raise QuantkitError(f"--gpus {count} makes no sense", f"choose 1 to {MOST_DEVICES:,}", USAGE)
    if name is None and not said:
        if count is not None:
            raise QuantkitError("--gpus says how many, but not of what", "add --gpu NAME, or --vram", USAGE)
        return None
    base = find(name) if name else Device("custom", "cuda", None, None, None)
    fewer = {} if tflops else base.fewer
    return replace(base, fewer=fewer, **said).times(count or 1)
