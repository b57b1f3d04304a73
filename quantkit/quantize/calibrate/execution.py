"""How a job runs: precision, device, batches, and the place of hidden states."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class Execution:
    """Settings of a run; all fields but the last two decide bytes of the output and are in the fingerprint.

    states: `device`, `host` or `disk`, where the hidden states of the calibration tokens are kept. at_once:
    sites of a layer's experts whose statistics a repeated forward gathers in one pass.
    """

    dtype: str
    device: str
    batch_size: int
    sequential: str
    threads: int
    states: str = "device"
    at_once: int = 1

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def decisive(self) -> dict:
        """Return the fields on which bytes of the output depend."""
        return {name: value for name, value in asdict(self).items() if name not in ("states", "at_once")}
