"""What a user types: messages of one line or several, and commands."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from quantkit.errors import USAGE, QuantkitError, count, name_all
from quantkit.serving.chat.session import Session

BLOCK = '"""'
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
    while True:
        try:
            line = read(False)
        except EOFError:
            return
        if not line.lstrip().startswith(BLOCK):
            yield line
            continue
        lines = [line.lstrip()[len(BLOCK) :]]
        while not lines[-1].rstrip().endswith(BLOCK):
            try:
                lines.append(read(True))
            except EOFError:
                yield "\n".join(lines).strip("\n")
                return
        lines[-1] = lines[-1].rstrip()[: -len(BLOCK)]
        yield "\n".join(lines).strip("\n")


def is_command(line: str) -> bool:
    """Whether a line is one, not something to say."""
    return line.startswith("/") and not line.startswith("//")


def obey(line: str, session: Session) -> str:
    """Do what a command says; what to tell the user.

    Raises QuantkitError for one that is none or lacks something, Leave and Again where others have to act.
    """
    name, _, rest = line.strip().partition(" ")
    if name not in COMMANDS:
        raise QuantkitError(f"there is no {name}", f"there are {name_all(COMMANDS, 10)}", USAGE)
    return COMMANDS[name](session, rest.strip())


def _reset(session: Session, rest: str) -> str:
    session.reset()
    return "begun anew"


def _system(session: Session, text: str) -> str:
    if session.conversation.raw:
        raise QuantkitError("a raw text has no system message", "start without --raw", USAGE)
    session.conversation.system = text
    return "the system message is set" if text else "there is no system message"


def _save(session: Session, name: str) -> str:
    path = _path(name, "/save")
    held = session.conversation.save(path)
    return f"saved; {path} holds {count(held, 'conversation')}"


def _load(session: Session, name: str) -> str:
    path = _path(name, "/load")
    session.conversation.load(path)
    return f"{count(len(session.conversation.messages), 'message')} of {path}"


def _path(name: str, command: str) -> Path:
    if not name:
        raise QuantkitError(f"{command} needs a file", f"for example {command} talk.jsonl", USAGE)
    try:
        (name,) = shlex.split(name)
    except ValueError:
        pass  # spaces or a quote in its name: as it stands
    try:
        path = Path(name).expanduser()
        named = os.fsencode(path)
    except (RuntimeError, UnicodeEncodeError) as error:  # no such user; a letter that the locale has not
        raise QuantkitError(f"{name} is no path: {error}", "choose another name", USAGE) from error
    if b"\0" in named:
        raise QuantkitError(f"{name} is no path: it holds a NUL", "choose another name", USAGE)
    return path


def _again(session: Session, rest: str) -> str:
    raise Again


def _leave(session: Session, rest: str) -> str:
    raise Leave


COMMANDS: dict[str, Callable[[Session, str], str]] = {
    "/reset": _reset,
    "/system": _system,
    "/retry": _again,
    "/save": _save,
    "/load": _load,
    "/help": lambda session, rest: HELP,
    "/exit": _leave,
    "/quit": _leave,
}
