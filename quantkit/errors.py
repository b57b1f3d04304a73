"""QuantkitError, the only exception that users see, and the exit codes of all commands."""

import errno
import re
from collections.abc import Callable, Collection, Mapping, Sequence

RUNTIME = 1
USAGE = 2
NOT_FOUND = 3
UNSUPPORTED = 4
RESOURCES = 5
VERIFICATION = 6
GATE = 7
INTERRUPTED = 130
TERMINATED = 143
EXIT_CODES = {  # as help, `quantkit doctor` and docs/jobs.md describe them
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
# Control characters but "\n" and "\t", halves of surrogate pairs, marks of text direction.
UNPRINTABLE = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069]")
FREE = "free some space"
DAMAGED = "the checkpoint is incomplete or damaged: copy or download it again"
DISK = {  # error number -> what is wrong with the disk, and what to do
    errno.ENOSPC: ("is full", FREE),
    errno.EDQUOT: ("is full: the quota is used up", FREE),
    errno.EFBIG: ("allows no file of this size (see ulimit -f)", "raise the limit"),
    errno.EROFS: ("has become read-only", "look for the reason in the system log"),
    errno.EIO: (
        "has an input/output error (this disk, or the disk that was read)",
        "look in the system log for the failing disk",
    ),
}


class QuantkitError(Exception):
    """An error that a user can correct, printed as `error: MESSAGE` and `hint: HINT`.

    exit_code: one of the constants of this module. found: the JSON record of a command that has a result
    despite the error. Errors in quantkit itself raise AssertionError instead.
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = RUNTIME, found: dict | None = None):
        self.message = shortened(message)  # it may quote a value of an untrusted file
        self.hint = shortened(hint)
        super().__init__(self.message)
        self.exit_code = exit_code
        self.found = found

    def record(self) -> dict:
        """Return the JSON object of the error, merged into the record in `found`."""
        error = {"message": self.message, "hint": self.hint, "exit_code": self.exit_code}
        return (self.found or {}) | {"error": error}


def refuse_problems(
    found: dict, problems: Sequence[str], exit_code: int = RUNTIME, hint: str = DAMAGED
) -> None:
    """Raise QuantkitError naming the first problem of a checkpoint, if there is one. found: its record."""
    if problems:
        more = f" (and {count(len(problems) - 1, 'more problem')})" if len(problems) > 1 else ""
        raise QuantkitError(problems[0] + more, hint, exit_code, found)


class DamagedError(QuantkitError):
    """Raised if the source is damaged, so that the results of a job on it are useless."""


def require(condition: object, message: str, hint: str = "", exit_code: int = RUNTIME) -> None:
    """Raise `QuantkitError(message, hint, exit_code)` unless the condition holds. The message is always
    formatted. If formatting can fail or is slow, write an `if` instead."""
    if not condition:
        raise QuantkitError(message, hint, exit_code)


def refusal(check: Callable[[], None]) -> dict | None:
    """Return the JSON object of the error that a check raises, or None. A dry run only reports it."""
    try:
        check()
    except QuantkitError as error:
        return error.record()["error"]
    return None


def compiled(pattern: str, complaint: str, hint: str, exit_code: int = USAGE) -> re.Pattern:
    """Compile a regular expression. Raises QuantkitError, `COMPLAINT is not a regular expression: REASON`."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise QuantkitError(f"{complaint} is not a regular expression: {error}", hint, exit_code) from error


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, or its type if it has no text. If the line ends in a colon,
    the next line is added."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def unreadable(name: object, error: OSError, hint: str = "check its permissions") -> QuantkitError:
    """Return the error (exit code 3) for a file that cannot be opened or read. name: the file, in words."""
    return QuantkitError(f"{name} cannot be read: {error.strerror}", hint, NOT_FOUND)


def full_disk(error: BaseException) -> tuple[str, str] | None:
    """Return the entry of `DISK` for an error, or None. Also finds OSErrors whose text a library wraps."""
    if isinstance(error, OSError):
        return DISK.get(error.errno)
    wrapped = re.search(r"\(os error (\d+)\)", str(error))
    wrapped = wrapped or re.search(r"^unable to (?:open|mmap) .* \((\d+)\)$", str(error))
    return DISK.get(int(wrapped[1])) if wrapped else None


def memory_ran_out(error: BaseException) -> bool:
    """Return whether an error of Python or torch says that memory ran out, on a CPU or an accelerator."""
    words = ("can't allocate memory", "out of memory")
    return isinstance(error, MemoryError) or any(part in str(error) for part in words)


def printable(text: str) -> str:
    """Return an untrusted text (names in files, output of models) with UNPRINTABLE characters replaced."""
    return UNPRINTABLE.sub("\ufffd", text)


def shortened(message: str, word: int = 400, whole: int = 1600) -> str:
    """Return a message on one line; cut out the middle of words longer than `word` and messages than `whole`.
    Messages may quote values of untrusted files, which can have any length."""
    words = " ".join(message.splitlines())
    words = re.sub(rf"\S{{{word},}}", lambda found: f"{found[0][:60]}…{found[0][-20:]}", words)
    return words if len(words) <= whole else f"{words[: whole - 201]}…{words[-200:]}"


def count(number: int, word: str) -> str:
    """Return a number with its noun, such as `1 block` or `1,024 blocks`."""
    plural = {"matrix": "matrices"}.get(word, f"{word}s")
    return f"{number:,} {word if number == 1 else plural}"


def name_all(names, limit: int = 8) -> str:
    """Return the first `limit` names joined by commas, and the number of the others."""
    names = list(names)
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def one_of(
    name: str, names: Collection[str], complaint: str, aliases: Mapping[str, str] | None = None
) -> str:
    """Return `name` if it is one of `names`; return the full name for one of the `aliases`. Raises
    QuantkitError (exit code 2) with the complaint, the most similar name and all names."""
    full = (aliases or {}).get(name, name)
    if full in names:
        return full
    guess = did_you_mean(nearest(name, [*names, *(aliases or ())]))
    raise QuantkitError(complaint, f"{guess}choose one of {', '.join(names)}", USAGE)


def nearest(name: str, names: Collection[str]) -> list[str]:
    """Return the most similar name; [] if none is similar."""
    import difflib

    lower = {known.lower(): known for known in names}
    return [lower[near] for near in difflib.get_close_matches(name.lower(), lower, 1)]


def did_you_mean(near: Collection[str], between: str = " or ") -> str:
    """Return the beginning of a hint that offers similar names; "" without any."""
    return f"did you mean {between.join(near)}? " if near else ""
