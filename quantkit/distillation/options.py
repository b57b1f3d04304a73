"""What a user may say about the training. No torch here: flags are made of these."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quantkit.errors import USAGE, QuantkitError
from quantkit.options import option


@dataclass(frozen=True)
class DistillOptions:
    """How the floats of a compressed student are trained."""

    epochs: int = option(2, "Passes over the text end to end; 0 leaves that stage out.")
    block_epochs: int = option(
        1, "Passes over the text for each block, before that; 0 leaves that stage out."
    )
    lr: float = option(
        0.002, "Learning rate end to end, at its peak: a share of the size of what is trained."
    )
    block_lr: float = option(0.002, "The same, block by block.")
    temperature: float = option(
        1.0, "Of teacher and student in the loss end to end; the divergence that decides has 1."
    )

    def check(self) -> None:
        """Raise QuantkitError for what nothing could be trained with."""
        for name in ("epochs", "block_epochs"):
            if getattr(self, name) < 0:
                raise QuantkitError(
                    f"{_flag(name)} {getattr(self, name)} makes no sense", "choose 0 or more", USAGE
                )
        if not (self.epochs or self.block_epochs):
            raise QuantkitError(
                "--epochs 0 and --block-epochs 0 leave nothing to do", "leave one of them out", USAGE
            )
        for name in ("lr", "block_lr", "temperature"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise QuantkitError(
                    f"{_flag(name)} {value:g} makes no sense", "choose a number above 0", USAGE
                )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
