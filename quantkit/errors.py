"""The one exception that users see, and the exit codes it carries."""

from __future__ import annotations

RUNTIME = 1
USAGE = 2
NOT_FOUND = 3
UNSUPPORTED = 4
RESOURCES = 5
VERIFICATION = 6
INTERRUPTED = 130


class QuantkitError(Exception):
    """A failure a user can act on: printed as `error: MESSAGE` and `hint: HINT`.

    `exit_code` is one of the constants of this module. Broken invariants of quantkit itself are
    assertions, never this.
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = RUNTIME):
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code


def first_line(error: BaseException) -> str:
    """What an error of another library says, for a message; its kind where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def name_all(names, limit: int = 8) -> str:
    """Join offenders for a message: every one of them up to `limit`, then how many are left."""
    names = list(names)
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
