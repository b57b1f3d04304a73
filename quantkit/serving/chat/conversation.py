"""What was said so far, and as a line of JSON that calibration reads.

Every line of a file is a conversation, {"messages": [{"role", "content"}, …]}, or {"text": …} of a raw one:
what `--calibration FILE` takes.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.errors import NOT_FOUND, USAGE, QuantkitError
from quantkit.models.files import atomic, untrusted

Prompt = Sequence[Mapping[str, str]] | str  # messages for the chat template, or text to go on from
ROWS = {  # of a file: calibration texts have other roles, and other columns
    "type": "array",
    "items": {
        "type": "object",
        "anyOf": [{"required": ["messages"]}, {"required": ["text"]}],
        "properties": {"messages": {"type": ["array", "null"]}, "text": {"type": ["string", "null"]}},
    },
}
MESSAGES = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["system", "user", "assistant"]},
            "content": {"type": "string"},
        },
    },
}
ROW_HINT = 'each line is to hold {"messages": [{"role": "user", "content": "…"}, …]}; choose another name'


@dataclass
class Conversation:
    """messages: users' and answers, in turn. raw: no roles, one text that both go on with."""

    system: str = ""
    raw: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)

    def prompt(self) -> Prompt:
        """For an engine."""
        if self.raw:
            return "".join(message["content"] for message in self.messages)
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.messages]

    def say(self, role: str, text: str) -> None:
        """Add a message."""
        self.messages.append({"role": role, "content": text})

    def drop_oldest(self) -> int:
        """Forget the oldest message of the user and its answers; how many messages those were. The last
        message is never dropped."""
        end = 1
        while end < len(self.messages) - 1 and self.messages[end]["role"] != "user":
            end += 1
        dropped = min(end, len(self.messages) - 1)
        del self.messages[:dropped]
        return dropped

    def save(self, path: Path) -> int:
        """Add it to the file as a line, or put it in the place of the last one where that is its beginning.

        Returns how many conversations the file holds. Raises QuantkitError when there is nothing to save, or
        the file is none of conversations.
        """
        if not self.messages:
            raise QuantkitError("nothing was said yet", "say something first", USAGE)
        if os.path.exists(path) and not path.is_file():  # a device would be replaced
            raise QuantkitError(f"{path} is no file", "save elsewhere", USAGE)
        rows = _read(path) if os.path.exists(path) else []
        key, mine = "text" if self.raw else "messages", self.prompt()
        before = rows[-1][key] if rows and rows[-1].keys() == {key} else None
        if type(before) is type(mine) and mine[: len(before)] == before:
            rows.pop()
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in (*rows, {key: mine}))
        try:
            with atomic.replacing(path) as new:  # a stranger's row may have a lone surrogate: as JSON has it
                new.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise QuantkitError(f"{path} cannot be written: {error.strerror}", "save elsewhere") from error
        return len(rows) + 1

    def load(self, path: Path) -> None:
        """Go on with the last conversation of a file. Raises QuantkitError where there is none."""
        rows = _read(path)
        key = "text" if self.raw else "messages"
        found = next((row[key] for row in reversed(rows) if row.get(key) is not None), None)
        if found is None:
            other = "without --raw" if self.raw else "with --raw"
            hint = f"each line holds {{{key!r}: …}}" + (f"; start quantkit chat {other}" if rows else "")
            raise QuantkitError(f"{path} holds no conversation", hint, USAGE)
        if self.raw:
            found = [{"role": "user", "content": found}]
        told = f"{path} holds a message that is none of system, user or assistant with a text"
        hint = 'messages look like {"role": "user", "content": "…"}'
        untrusted.check_schema(found, MESSAGES, told, hint, USAGE)
        messages = [{name: message[name] for name in ("role", "content")} for message in found]
        if any("Cs" in map(unicodedata.category, message["content"]) for message in messages):
            hint = "take the lone surrogates, such as \\ud800, out of it"
            raise QuantkitError(f"{path} holds a message that is no Unicode text", hint, USAGE)
        if not self.raw:
            self.system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else ""
        self.messages = messages


def _read(path: Path) -> list[dict[str, Any]]:
    """The file's rows. Raises QuantkitError where it is no plain file, or holds anything else."""
    other = f"{path} holds other things than conversations"
    try:
        untrusted.refuse_irregular(path)
        rows = [untrusted.parse(line) for line in path.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        raise QuantkitError(
            f"{path} cannot be read: {error.strerror}", "check the path", NOT_FOUND
        ) from error
    except ValueError as error:
        raise QuantkitError(other, ROW_HINT, USAGE) from error
    untrusted.check_schema(rows, ROWS, other, ROW_HINT, USAGE)
    return rows
