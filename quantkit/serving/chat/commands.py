"""Reads what a user types: messages of one or several lines, and commands such as /save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from quantkit.errors import USAGE, QuantkitError, name_all, require
from quantkit.serving.chat.session import ChatSession

BLOCK = '"""'
NAMES = ("/reset", "/system", "/retry", "/save", "/help", "/exit", "/quit")
HELP = f"""/reset         start again; the system message stays
/system TEXT   set the system message; without TEXT remove it
/retry         give the last answer again, with the next seed
/save FILE     add the conversation to FILE, as --calibration reads it
/help          this
/exit, /quit   leave, as Ctrl-D does
{BLOCK}            begins and ends a message of several lines
//…            a message that begins with a slash
Ctrl-C         stops the answer; the text so far stays"""


def messages(read: Callable[[bool], str]) -> Iterator[str]:
    """Yield messages: single lines, or the lines between two lines of three quotes.

    read: returns the next line, or raises EOFError; its argument says whether a message is still open.
    """
    lines: list[str] = []  # lines of an open message
    while True:
        try:
            line = read(bool(lines))
        except EOFError:
            break
        if not lines and not line.lstrip().startswith(BLOCK):
            yield line
            continue
        lines.append(line if lines else line.lstrip()[len(BLOCK) :])
        if lines[-1].rstrip().endswith(BLOCK):
            lines[-1] = lines[-1].rstrip()[: -len(BLOCK)]
            yield "\n".join(lines).strip("\n")
            lines = []
    if lines:
        yield "\n".join(lines).strip("\n")


def is_command(line: str) -> bool:
    """Return whether a line is a command rather than a message."""
    return line.startswith("/") and not line.startswith("//")


def obey(line: str, session: ChatSession) -> str:
    """Run a command other than /retry and /exit; return the reply to the user.

    Raises QuantkitError for an unknown or incomplete command.
    """
    name, _, rest = line.strip().partition(" ")
    talk, rest = session.conversation, rest.strip()
    match name:
        case "/reset":
            session.reset()
            return "started again"
        case "/system":
            require(not talk.raw, "raw text has no system message", "start without --raw", USAGE)
            talk.system = rest
            return "the system message is set" if rest else "the system message is removed"
        case "/save":
            require(rest, "/save needs a file", "for example /save talk.jsonl", USAGE)
            talk.save(Path(rest))
            return f"saved to {rest}"
        case "/help":
            return HELP
    raise QuantkitError(f"unknown command {name}", f"commands: {name_all(NAMES, 10)}", USAGE)
