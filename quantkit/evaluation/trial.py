"""A data-free method tried in memory: what it would cost, without writing anything."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch

from quantkit.errors import USAGE, QuantkitError
from quantkit.grids.distance import weight_error
from quantkit.layouts import LinearSpec, WeightsOnly
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize import linears, methods
from quantkit.quantize.methods import Method
from quantkit.quantize.outputs import Sizes


def data_free() -> list[str]:
    """Methods that can be tried: with their default options they need no text."""
    found = []
    for name in methods.available():
        with suppress(QuantkitError):  # a method that makes no checkpoint says so
            found += [] if _by_default(name).needs else [name]
    return found


def _by_default(name: str) -> Method:
    module = methods.load(name)
    return module.build(module.Options())


@dataclass(frozen=True)
class Trial:
    """One method with its default options, applied to blocks as they are loaded."""

    method: Method
    specs: list[LinearSpec]

    @staticmethod
    def prepare(name: str, checkpoint: Checkpoint) -> Trial:
        """Resolve the method on the checkpoint's shapes.

        Raises QuantkitError if it is none, needs calibration or does not fit, and for a quantized checkpoint.
        """
        if name not in methods.available():
            raise QuantkitError(f"--as {name}: no such method", f"choose {' or '.join(data_free())}", USAGE)
        method = _by_default(name)
        if method.needs:
            raise QuantkitError(
                f"--as {name} needs calibration text, so it cannot be tried on the fly",
                hint=f"write it with quantkit {name}, then evaluate that folder",
                exit_code=USAGE,
            )
        if checkpoint.quantized:
            raise QuantkitError(
                f"{checkpoint.source} is quantized already", "give --as the original checkpoint", USAGE
            )
        skeleton = Skeleton(checkpoint, torch.float32, torch.device("cpu"))
        return Trial(method, linears.resolve(skeleton, method.make_grid, method.layout, (), ()))

    def apply(self, skeleton: Skeleton, index: int, weights_only: bool = False) -> dict[str, float]:
        """Quantize block `index`, which is loaded, and make it compute as a client of the result would, or
        with the decoded weights alone.

        Returns the relative squared error of each of its linears' weights. Codes of streamed experts stay in
        memory, their weights do not.
        """
        errors, layout = {}, self.method.layout
        layout = WeightsOnly(layout) if weights_only else layout
        for row in self.specs:
            if row.block == index and row.grid is not None:
                weight = skeleton.part(index, row.local).weight.float()
                (solved,) = self.method.solver.solve([weight], [row.grid], None)
                parts = self.method.layout.encode(solved.weight)
                values = skeleton.install(
                    index,
                    row.local,
                    layout,
                    parts,
                    f"{row.name}.weight",
                    lambda parts=parts: parts,
                )
                errors[row.name] = weight_error(weight, values)
        return errors

    def sizes(self, checkpoint: Checkpoint) -> Sizes:
        """Of the tensors that would be written."""
        return self.method.output.sizes(checkpoint, self.specs, self.method.layout)
