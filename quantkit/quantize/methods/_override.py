"""`--override REGEX=BITS[,GROUP_SIZE]`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, compiled, require

ESCAPE = r"escape dots and parentheses, as in 'layers\.0\.'"


@dataclass(frozen=True)
class Override:
    """`REGEX=bits[,group_size]`: another grid for linears whose names match."""

    text: str
    pattern: re.Pattern
    bits: int
    group_size: int | None = None

    @staticmethod
    def parse(text: str) -> Override:
        """Parse `REGEX=bits[,group_size]`. Raises QuantkitError if malformed."""
        parts = re.fullmatch(r"(.+)=(\d+)(?:,(-?\d+))?", text)
        what = f"--override {text!r} is not REGEX=bits or REGEX=bits,group_size"
        require(parts, what, r"for example --override 'layers\.0\.=8' or --override 'down_proj$=4,32'", USAGE)
        pattern, bits, group_size = parts.groups()
        regex = compiled(pattern, f"--override {pattern!r}", ESCAPE)
        return Override(text, regex, int(bits), None if group_size is None else int(group_size))

    @property
    def flag(self) -> str:
        """The flag as typed, for messages."""
        return f"--override {self.text}"

    def refused(self, reason: str) -> QuantkitError:
        """Return the error of a method that takes no such override."""
        return QuantkitError(
            f"{self.flag}: {reason}", "keep linears in 16 bit with --exclude instead", UNSUPPORTED
        )
