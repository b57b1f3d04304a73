"""Options of `quantkit distill`. Flags are made from them, so torch is not imported."""

import math
from dataclasses import dataclass

from quantkit.errors import USAGE, QuantkitError
from quantkit.options import check_value, flag_of, option


@dataclass(frozen=True)
class DistillOptions:
    """Options of `quantkit distill`."""

    epochs: int = option(2, "Passes over the text in the second stage (end to end); 0: none.")
    block_epochs: int = option(1, "Passes over the text in the first stage (block by block); 0: none.")
    lr: float = option(0.002, "Peak learning rate of the second stage, relative to the trained values.")
    block_lr: float = option(0.002, "Peak learning rate of the first stage, relative to the trained values.")
    temperature: float = option(
        1.0, "Temperature of the loss of the second stage: above 1, unlikely tokens count for more."
    )

    def check(self) -> None:
        """Raise QuantkitError for invalid values."""
        for name in ("epochs", "block_epochs"):
            value = getattr(self, name)
            check_value(flag_of(name), value, value >= 0, "choose 0 or more")
        if not (self.epochs or self.block_epochs):
            raise QuantkitError("--epochs 0 and --block-epochs 0 leave nothing to do", "leave one out", USAGE)
        for name in ("lr", "block_lr", "temperature"):
            value = getattr(self, name)
            check_value(flag_of(name), value, 0 < value < math.inf, "choose a number above 0")
