"""What a user types: messages of one line or several, and commands."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from quantkit.errors import USAGE, QuantkitError, count, name_all
from quantkit.serving.chat.session import Session

BLOCK = '"""'
NAMES = ("/reset", "/system", "/retry", "/save", "/load", "/help", "/exit", "/quit")
HELP = f"""/reset         begin anew; the system message stays
/system TEXT   set the system message; without TEXT it is taken away
/retry         give the last answer again, with the next seed
/save FILE     add the conversation to FILE, as --calibration reads it
/load FILE     go on with the last conversation of FILE
/help          this
/exit, /quit   leave, as Ctrl-D does
{BLOCK}            begins and ends a message of several lines
//…            a message that begins with a slash
Ctrl-C         stops the answer; what was said of it stays"""


class Leave(Exception):
    """The user leaves."""


class Again(Exception):
    """The user wants another answer."""


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
    """Do what a command says; what to tell the user.

    Raises QuantkitError for one that is none or lacks something, Leave and Again where others have to act.
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
        case "/retry":
            raise Again
        case "/save":
            path = _path(rest, name)
            return f"saved; {path} holds {count(talk.save(path), 'conversation')}"
        case "/load":
            path = _path(rest, name)
            talk.load(path)
            return f"{count(len(talk.messages), 'message')} of {path}"
        case "/help":
            return HELP
        case "/exit" | "/quit":
            raise Leave
    raise QuantkitError(f"there is no {name}", f"there are {name_all(NAMES, 10)}", USAGE)


def _path(name: str, command: str) -> Path:
    if not name:
        raise QuantkitError(f"{command} needs a file", f"for example {command} talk.jsonl", USAGE)
    try:
        (name,) = shlex.split(name)
    except ValueError:
        pass  # spaces or a quote in its name: as it stands
    try:
        path = Path(name).expanduser()
        if b"\0" in os.fsencode(path):
            raise RuntimeError("it holds a NUL")
    except (RuntimeError, UnicodeEncodeError) as error:  # no such user; a letter that the locale has not
        raise QuantkitError(f"{name} is no path: {error}", "choose another name", USAGE) from error
    return path
