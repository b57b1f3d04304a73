"""What a user types: messages of one line or several, and commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from quantkit.errors import USAGE, QuantkitError, name_all
from quantkit.serving.chat.session import Session

BLOCK = '"""'
NAMES = ("/reset", "/system", "/retry", "/save", "/help", "/exit", "/quit")
HELP = f"""/reset         begin anew; the system message stays
/system TEXT   set the system message; without TEXT it is taken away
/retry         give the last answer again, with the next seed
/save FILE     add the conversation to FILE, as --calibration reads it
/help          this
/exit, /quit   leave, as Ctrl-D does
{BLOCK}            begins and ends a message of several lines
//…            a message that begins with a slash
Ctrl-C         stops the answer; what was said of it stays"""


def messages(read: Callable[[bool], str]) -> Iterator[str]:
    """What is said, a line each, or what stands between lines of three quotes.

    read: the next line without its end; told whether it goes on with a message. Raises EOFError at the end.
    """
    lines: list[str] = []  # of a message that goes on
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
    """Whether a line is one, not something to say."""
    return line.startswith("/") and not line.startswith("//")


def obey(line: str, session: Session) -> str:
    """Do what a command says; return what to tell the user. /retry and /exit are the caller's to obey.

    Raises QuantkitError for one that is none, or lacks something.
    """
    name, _, rest = line.strip().partition(" ")
    talk, rest = session.conversation, rest.strip()
    match name:
        case "/reset":
            session.reset()
            return "begun anew"
        case "/system":
            if talk.raw:
                raise QuantkitError("a raw text has no system message", "start without --raw", USAGE)
            talk.system = rest
            return "the system message is set" if rest else "there is no system message"
        case "/save":
            if not rest:
                raise QuantkitError("/save needs a file", "for example /save talk.jsonl", USAGE)
            talk.save(Path(rest))
            return f"saved to {rest}"
        case "/help":
            return HELP
    raise QuantkitError(f"there is no {name}", f"there are {name_all(NAMES, 10)}", USAGE)
