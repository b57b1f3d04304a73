"""The one exception that users see, and the exit codes of every command."""

from __future__ import annotations

import errno
import re
import unicodedata
from collections.abc import Collection, Mapping

RUNTIME = 1
USAGE = 2
NOT_FOUND = 3
UNSUPPORTED = 4
RESOURCES = 5
VERIFICATION = 6
GATE = 7
INTERRUPTED = 130
TERMINATED = 143
EXIT_CODES = {  # in the words of the help, of `quantkit doctor` and of docs/jobs.md
    0: "done",
    RUNTIME: "failed while running",
    USAGE: "wrong usage",
    NOT_FOUND: "not found, or offline",
    UNSUPPORTED: "not supported",
    RESOURCES: "not enough memory or disk",
    VERIFICATION: "written, but the verification failed",
    GATE: "a gate failed",
    INTERRUPTED: "interrupted",
    TERMINATED: "terminated",
}
TURNING = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # right to left, and back
ROOM = "free some space"
DISK = {  # what a disk says that takes or gives no more, and what to do about it
    errno.ENOSPC: ("is full", ROOM),
    errno.EDQUOT: ("is full: the quota is used up", ROOM),
    errno.EFBIG: ("takes no file of that size (ulimit -f says how large)", ROOM),
    errno.EROFS: ("is read-only by now", "see in the system's log why, and let it be written"),
    errno.EIO: (
        "fails, or that of what was read (input/output error)",
        "see in the system's log which one, and mend or leave it",
    ),
}


class QuantkitError(Exception):
    """A failure a user can act on: printed as `error: MESSAGE` and `hint: HINT`.

    `exit_code` is one of the constants of this module. `found` is the JSON record of a command that has a
    result all the same. Broken invariants of quantkit itself are assertions, never this.
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = RUNTIME, found: dict | None = None):
        self.message = shortened(message)  # a value of a stranger's file is quoted in it
        self.hint = shortened(hint)
        super().__init__(self.message)
        self.exit_code = exit_code
        self.found = found

    def record(self) -> dict:
        """What `--json` prints: the error, beside what was found."""
        error = {"message": self.message, "hint": self.hint, "exit_code": self.exit_code}
        return (self.found or {}) | {"error": error}


class DamagedError(QuantkitError):
    """The source itself is wrong: whatever a job made of it so far is of no use."""


def require(condition: object, message: str, hint: str = "", exit_code: int = RUNTIME) -> None:
    """Raise `QuantkitError(message, hint, exit_code)` unless the condition holds.

    The message is formatted either way: where that fails or is slow, write the `if`.
    """
    if not condition:
        raise QuantkitError(message, hint, exit_code)


def first_line(error: BaseException) -> str:
    """What an error of another library says, for a message; its kind where it says nothing. A line that ends
    in a colon goes on."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def full_disk(error: BaseException) -> tuple[str, str] | None:
    """What of `DISK` an error says; None for another. safetensors and torch wrap the OSError in own words."""
    if isinstance(error, OSError):
        return DISK.get(error.errno)
    wrapped = re.search(r"\(os error (\d+)\)", str(error))
    wrapped = wrapped or re.search(r"^unable to (?:open|mmap) .* \((\d+)\)$", str(error))
    return DISK.get(int(wrapped[1])) if wrapped else None


def printable(text: str) -> str:
    """Text of strangers (names in files, what models write) without what would steer a terminal, turn the
    direction of what follows, or be no character at all."""
    return "".join(
        letter
        if letter in "\n\t" or (unicodedata.category(letter) not in ("Cc", "Cs") and letter not in TURNING)
        else "\ufffd"
        for letter in text
    )


def shortened(message: str, word: int = 400, whole: int = 1600) -> str:
    """A message on one line, without the middle of what is quoted in it at great length: a value of a
    stranger's file may have any. Words that people use, paths among them, stay whole."""
    words = " ".join(message.splitlines())
    words = re.sub(rf"\S{{{word},}}", lambda found: f"{found[0][:60]}…{found[0][-20:]}", words)
    return words if len(words) <= whole else f"{words[: whole - 201]}…{words[-200:]}"


def count(number: int, word: str) -> str:
    """`1 block`, `1,024 blocks`."""
    plural = {"matrix": "matrices"}.get(word, f"{word}s")
    return f"{number:,} {word if number == 1 else plural}"


def name_all(names, limit: int = 8) -> str:
    """Join offenders for a message: every one of them up to `limit`, then how many are left."""
    names = list(names)
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def one_of(
    name: str, names: Collection[str], complaint: str, aliases: Mapping[str, str] | None = None
) -> str:
    """`name`, or what it is an alias of, where `names` has that.

    Raises QuantkitError (exit code 2) with the complaint, the nearest name and all of them.
    """
    import difflib

    known = (aliases or {}).get(name, name)
    if known in names:
        return known
    near = difflib.get_close_matches(name, [*names, *(aliases or ())], 1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise QuantkitError(complaint, f"{meant}choose one of {', '.join(names)}", USAGE)
