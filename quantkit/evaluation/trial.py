"""Applies a data-free method in memory, to measure its loss without writing a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from quantkit.errors import USAGE, QuantkitError, count, did_you_mean, nearest, require
from quantkit.layouts import LinearSpec
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize import methods
from quantkit.quantize.methods import BuiltMethod, Method
from quantkit.quantize.outputs import Sizes
from quantkit.quantize.prepare import linears, recipe
from quantkit.quantize.solving import round_block


def data_free() -> list[str]:
    """Return the names of the methods that need no calibration text by default."""
    names = []
    for name in methods.available():
        with suppress(QuantkitError):  # raised by methods that make no checkpoint
            names += [] if methods.create(name).build().needs else [name]
    return names


def _method(name: str, settings: Sequence[str]) -> Method:
    """Return a method with settings such as `solver=rtn` in place of defaults. Raises QuantkitError."""
    method = recipe.method_with(name, settings, "--as")
    method.check()
    return method


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
        name, *settings = typed.split(",")
        if name not in methods.available():
            hint = f"{did_you_mean(nearest(name, methods.available()))}choose {' or '.join(data_free())}"
            raise QuantkitError(f"--as {typed}: no such method", hint, USAGE)
        methods.create(name).build()  # gguf writes files only, so its options are not looked at
        method = _method(name, settings)
        if method.build().needs:
            hint = f"write it with quantkit {name}, then evaluate that folder"
            with suppress(QuantkitError):
                plain = [*settings, "solver=rtn", "transform=none"]
                if not _method(name, plain).build().needs:
                    hint = f"--as {','.join([name, *plain])} rounds to nearest, without text; or {hint}"
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
