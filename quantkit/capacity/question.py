"""The flags of `quantkit plan`."""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from quantkit.capacity import devices
from quantkit.capacity.devices import Device
from quantkit.errors import USAGE, require
from quantkit.models import kv_types
from quantkit.models.machine import processor
from quantkit.options import MOST, check_value, flag_of, option, parse_tokens


@dataclass(frozen=True)
class Question:
    """Flags of `quantkit plan`: device, sequences and calibration."""

    gpu: str | None = option(None, "Device, such as a100-40g, m3-max or cpu. A wrong name lists all.")
    gpus: int | None = option(
        None, "Number of such devices, counted as one large device: the best case of tensor parallelism."
    )
    vram: float | None = option(None, "Memory of the device in GiB.")
    bandwidth: float | None = option(None, "Memory bandwidth of the device in GB/s.")
    tflops: float | None = option(None, "Dense 16-bit TFLOPS of the device.")
    ctx: int | None = option(
        None,
        "Tokens per sequence, such as 8192 or 32k (32,768). (default: 4096, or the model's limit)",
        parser=parse_tokens,
    )
    batch: int = option(1, "Sequences at once.")
    kv_dtype: str = option(
        "bf16",
        "Precision of the KV cache: bf16, fp16, fp32, fp8, int8, int4, q8_0, q4_0. Measure the loss with "
        "quantkit eval --kv-dtype.",
        names=kv_types.TYPES,
    )
    format: str | None = option(
        None,
        "Show one format of the weights: a method, a GGUF file type, bf16, mlx or stored (as the files are). "
        "A wrong name lists all. With --json: the format of requests_that_fit and roofline.",
    )
    samples: int = option(128, "Number of calibration sequences of a job.")
    seqlen: int = option(512, "Tokens per calibration sequence of a job.")
    threads: int | None = option(None, "CPU threads of a job here. (default: OMP_NUM_THREADS, or all cores)")

    def check(self) -> None:
        """Raise QuantkitError for values that are invalid for every model."""
        for name in ("gpus", "batch", "samples", "seqlen", "threads"):
            value = getattr(self, name)
            check_value(flag_of(name), value, value is None or 1 <= value <= MOST, f"choose 1 to {MOST:,}")
        for name in ("vram", "bandwidth", "tflops"):
            value = getattr(self, name)
            check_value(flag_of(name), value, value is None or 0 < value < 1e9, "give a positive number")
        placed = not self.gpus or self.single_device
        require(placed, "--gpus needs a device", "add --gpu NAME, or --vram", USAGE)
        _ = self.kv_bytes, self.device

    @property
    def kv_bytes(self) -> Fraction:
        """Return the bytes per value of the KV cache."""
        return kv_types.TYPES[kv_types.named(self.kv_dtype)].nbytes

    @property
    def cpu_threads(self) -> int:
        """Return the number of threads of a job on this machine."""
        return self.threads or processor.threads()

    @cached_property
    def single_device(self) -> Device | None:
        """Return the device of --gpu, changed by --vram, --bandwidth and --tflops; None without flags."""
        given = {"memory_gib": self.vram, "bandwidth_gbs": self.bandwidth, "tflops": self.tflops}
        given = {key: value for key, value in given.items() if value is not None}
        if self.gpu is None and not given:
            return None
        base = devices.find(self.gpu) if self.gpu else Device("custom", "cuda", None, None, None)
        base = devices.this_machine(self.cpu_threads) if base.kind == "cpu" else base
        return replace(base, fewer={} if self.tflops else base.fewer, **given)

    @cached_property
    def device(self) -> Device | None:
        """Return all devices counted as one."""
        return self.single_device and self.single_device.times(self.gpus or 1)

    @property
    def memory(self) -> int | None:
        """Return the bytes of device memory for weights and cache; None if unknown."""
        device = self.device
        return None if not device or not device.memory_bytes else int(device.usable * device.memory_bytes)
