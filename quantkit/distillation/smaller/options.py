"""What `quantkit distill TEACHER --blocks N --width N` is asked for. No torch here: flags are made of
these."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantkit.errors import USAGE, QuantkitError
from quantkit.options import option

WIDTH = re.compile(r"(?P<number>\d+)(?P<percent>\s*%)?")


@dataclass(frozen=True)
class Options:
    """The student's shape, and how it is trained."""

    blocks: int | None = option(
        None, "Decoder blocks of the student: those whose absence changes the predictions most are kept."
    )
    width: str | None = option(
        None,
        "Channels of the student's MLPs (intermediate_size), such as 512 or 75%: those that matter most to "
        "the block's output are kept.",
    )
    self_text: bool = option(
        False,
        "Train on text that the teacher writes itself, --samples sequences sampled with --seed, instead of "
        "the given text, by which the student is then only chosen and judged.",
    )
    epochs: int = option(3, "Passes over the training text.")
    steps: int | None = option(None, "Training steps; replaces --epochs.")
    lr: float = option(
        1e-3, "Highest learning rate of AdamW: up in a tenth of the steps, then a cosine to 0."
    )
    temperature: float = option(
        2.0, "Divides the logits of both in the loss: above 1, what is unlikely counts for more."
    )
    hidden_weight: float = option(
        1.0, "Weight of the relative squared distance between what enters the heads of teacher and student."
    )
    lm_weight: float = option(
        0.0, "Weight of the usual loss on the text's own next token, beside the divergence from the teacher."
    )

    def check(self) -> None:
        """Raise QuantkitError for values that make no sense, whatever the teacher."""
        if self.blocks is None and self.width is None:
            raise QuantkitError(
                "the student has the teacher's shape",
                "make it smaller: --blocks 4, --width 75% or both",
                USAGE,
            )
        wrong = {
            f"--blocks {self.blocks}": self.blocks is not None and self.blocks < 1,
            f"--width {self.width}": self.width is not None and not WIDTH.fullmatch(self.width),
            f"--epochs {self.epochs}": self.epochs < 1,
            f"--steps {self.steps}": self.steps is not None and self.steps < 1,
            f"--lr {self.lr:g}": not 0 < self.lr < 1,
            f"--temperature {self.temperature:g}": not 0 < self.temperature <= 100,
            f"--hidden-weight {self.hidden_weight:g}": not 0 <= self.hidden_weight < float("inf"),
            f"--lm-weight {self.lm_weight:g}": not 0 <= self.lm_weight < float("inf"),
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise QuantkitError(f"{name} makes no sense", _HINTS[name.split()[0]], USAGE)

    def channels(self, width: int) -> int | None:
        """Channels to keep of `width`; None where all are. Raises QuantkitError unless that is fewer."""
        if self.width is None:
            return None
        match = WIDTH.fullmatch(self.width)
        number = int(match["number"])
        wanted = width * number // 100 if match["percent"] else number
        if not 0 < wanted < width:
            raise QuantkitError(
                f"--width {self.width}: the teacher's MLPs have {width} channels",
                hint=f"choose 1 to {width - 1}, or 1% to 99%",
                exit_code=USAGE,
            )
        return wanted


_HINTS = {
    "--blocks": "choose 1 or more",
    "--width": "choose a number of channels, such as 512, or a share, such as 75%",
    "--epochs": "choose 1 or more",
    "--steps": "choose 1 or more",
    "--lr": "choose about 0.001; less for a large model",
    "--temperature": "choose 1 to 4",
    "--hidden-weight": "choose 0 to 10",
    "--lm-weight": "choose 0 to 1",
}
