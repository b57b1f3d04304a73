"""Stage a block piece by piece, so that neither its codes nor its weights accumulate in memory."""

from pathlib import Path

from torch import Tensor

from quantkit.models.files import reading, safetensors_folder
from quantkit.models.machine.device import to_host
from quantkit.models.machine.memory import return_freed_pages
from quantkit.quantize.staging.folder import Staging

PART_BYTES = 1 << 20  # codes of a block in memory before they are staged
ACCELERATED_PART_BYTES = 1 << 27  # an accelerator makes a block in less time than a disk syncs many files
HOLES = 32 << 20  # bytes staged between heap trims; a trim costs page faults


class BlockParts:
    """Tensors of a block in progress, by stored name. At most `PART_BYTES` wait in memory, for an accelerator
    `ACCELERATED_PART_BYTES`, and as many are being written. `parts` reads any tensor back."""

    def __init__(self, staging: Staging, index: int):
        staging.start(index)
        self._staging, self._index = staging, index
        self._waiting: dict[str, Tensor] = {}
        self._begun: dict[str, Tensor] = {}  # tensors that are being written
        self._files: dict[str, Path] = {}
        self._linears: dict[str, list[str]] = {}
        self._count = 0
        self._since = 0  # bytes staged since the last trim

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Add tensors; stage them once PART_BYTES are in memory."""
        most = PART_BYTES if all(tensor.is_cpu for tensor in tensors.values()) else ACCELERATED_PART_BYTES
        self._waiting |= {name: to_host(tensor) for name, tensor in tensors.items()}
        if sum(tensor.nbytes for tensor in self._waiting.values()) < most:
            return
        path = self._staging.write_part(self._index, self._count, self._waiting)
        self._files |= dict.fromkeys(self._waiting, path)
        self._since += sum(tensor.nbytes for tensor in self._waiting.values())
        self._begun, self._waiting, self._count = self._waiting, {}, self._count + 1
        if self._since > HOLES:
            self._since = 0
            return_freed_pages(also_kept=True)

    def add_linear(self, name: str, parts: dict[str, Tensor]) -> None:
        """Add the packed tensors of linear `name`."""
        self._linears[name] = list(parts)
        self.add({f"{name}.{part}": tensor for part, tensor in parts.items()})

    def parts(self, name: str) -> dict[str, Tensor]:
        """Return the packed tensors of linear `name`."""
        return {part: self.tensor(f"{name}.{part}") for part in self._linears[name]}

    def tensor(self, name: str) -> Tensor:
        """Return an added tensor."""
        for tensors in (self._waiting, self._begun):
            if name in tensors:
                return tensors[name]
        return reading.tensor(safetensors_folder.read_header(self._files[name])[name])

    def finish(self, record: list[dict]) -> None:
        """Stage the remaining tensors and the record of the linears, once all earlier blocks are staged."""
        self._staging.wait(but=1 if self._count else 0)
        self._staging.write_block(self._index, self._waiting, record)
