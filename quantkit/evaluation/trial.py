"""Applies a data-free method in memory, to measure its loss without writing a checkpoint."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch

from quantkit.errors import USAGE, QuantkitError, count, require
from quantkit.evaluation.settings import trial_method
from quantkit.layouts import LinearSpec
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize import methods
from quantkit.quantize.methods import BuiltMethod
from quantkit.quantize.outputs import Sizes
from quantkit.quantize.prepare import linears
from quantkit.quantize.solving import round_block


@dataclass(frozen=True)
class Trial:
    """A method that is applied to blocks when they are loaded. name: as typed, such as `fp4,solver=rtn`."""

    name: str
    method: BuiltMethod
    specs: list[LinearSpec]

    @staticmethod
    def prepare(typed: str, checkpoint: Checkpoint) -> Trial:
        """Parse `METHOD` or `METHOD,OPTION=VALUE,…` and check it against the checkpoint's shapes.

        Raises QuantkitError if the method is unknown, needs calibration or does not fit the shapes, or if the
        checkpoint is quantized already.
        """
        name = typed.partition(",")[0]
        if name in methods.available():
            methods.create(name).build()  # gguf writes files only, so its options are not looked at
        method = trial_method(typed)
        if method.build().needs:
            hint = f"write it with quantkit {name}, then evaluate that folder"
            with suppress(QuantkitError):
                plain = f"{typed},solver=rtn,transform=none"
                if not trial_method(plain).build().needs:
                    hint = f"--as {plain} rounds to nearest, without text; or {hint}"
            what = f"--as {typed} needs calibration text, so it cannot be tried on the fly"
            raise QuantkitError(what, hint, USAGE)
        what = f"{checkpoint.source} is quantized already"
        require(not checkpoint.quantized, what, "give --as the original checkpoint", USAGE)
        skeleton = Skeleton(checkpoint, torch.float32, torch.device("cpu"))
        if opened := method.has_open_groups:
            method = linears.fitted(skeleton, method, (), ())
            if (size := method.options.group_size) != methods.GROUP_SIZES[0]:
                typed += f",group_size={size}"
        built = method.build()
        specs = linears.resolve(skeleton, built.make_grid, built.layout, (), (), opened)
        if opened and (kept := linears.undivided(specs)):
            typed += f" ({count(len(kept), 'linear')} in 16 bit)"
        return Trial(typed, built, specs)

    def apply(self, skeleton: Skeleton, index: int, weights_only: bool = False) -> None:
        """Quantize the loaded block `index`; make it compute as a client would, or with decoded weights if
        `weights_only`."""
        method = self.method
        round_block(skeleton, index, self.specs, method.solver, method.layout, weights_only)

    def sizes(self, checkpoint: Checkpoint) -> Sizes:
        """Return the sizes of the tensors that the method would write."""
        return self.method.output.sizes(checkpoint, self.specs, self.method.layout)
