"""How a job runs: precision, device, batches, and where hidden states are kept."""

from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class Execution:
    """Settings of a run. All fields but the last two affect the output's bytes and are in the fingerprint.

    batch_size: sequences per forward pass. states: `device`, `host` or `disk`, where the hidden states are
    kept. at_once: how many sites of experts one repeated pass measures, and an accelerator solves together.
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
        """Return the fields that affect the output's bytes."""
        return {name: value for name, value in asdict(self).items() if name not in ("states", "at_once")}
