"""Renders conversations as text with the model's own chat template."""

import datetime
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError
from quantkit.options import CalibrationOptions
from quantkit.text import template_worker

COLUMNS = ("messages", "conversations")  # columns of conversations in chat datasets
TOOLS = "tools"  # column of the tools that a conversation's template lists
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}  # other names stay as they are
TODAY = datetime.date(2024, 7, 26)  # fixed, so that jobs can be resumed later; Llama 3's default date


@dataclass(frozen=True)
class Conversation:
    """Messages of a conversation, each {"role", "content"} or ShareGPT's {"from", "value"}. where: the row,
    for an error. tools: JSON schemas of the functions that the model may call."""

    messages: list[Any]
    where: str
    tools: Sequence[Mapping[str, Any]] = ()


def column_of(columns: Iterable[str], requested: str) -> str | None:
    """Return the column of texts: `requested`, or for the default a chat column; None if there is none."""
    candidates = (requested, *(COLUMNS if requested == CalibrationOptions.text_column else ()))
    columns = list(columns)
    return next((name for name in candidates if name in columns), None)


class ChatTemplate:
    """A tokenizer's chat template, or the one `given`. today: date that templates print. sha256: of the
    template; None before the first `render`."""

    def __init__(self, tokenizer, given: str | None = None, today: datetime.date = TODAY):
        self.tokenizer = tokenizer
        self.sha256: str | None = None
        self._given = given
        self._today = today

    def render(self, conversation: Conversation, answer: bool = False) -> str:
        """Return the conversation as text with special tokens. answer: end with the beginning of the model's
        next answer.

        Raises QuantkitError if the model has no template, or if the template rejects the messages.
        """
        tools = list(conversation.tools) or None
        try:
            template = self.tokenizer.get_chat_template(self._given, tools)
        except ValueError as error:
            hint = "put its chat_template.jinja into its folder, or give plain text"
            raise QuantkitError("the model has no chat template", hint, USAGE) from error
        if self.sha256 is None:
            self.sha256 = hashlib.sha256(template.encode(errors="surrogatepass")).hexdigest()
        messages = [_message(message, conversation.where) for message in conversation.messages]
        dated, special = _at_a_fixed_date(template, self._today), self.tokenizer.special_tokens_map
        try:
            return template_worker.WORKER.render(dated, messages, special, answer, tools)
        except template_worker.Failed as error:
            what = f"{conversation.where} does not fit the chat template: {error}"
            hint = "leave such rows out, or give their text under another column"
            raise QuantkitError(what, hint, USAGE) from error
        except template_worker.Runaway as error:
            what = f"the chat template was stopped: {error}"
            hint = "do not trust it; give plain text"
            raise QuantkitError(what, hint, UNSUPPORTED) from error


def _at_a_fixed_date(template: str, today: datetime.date) -> str:
    """Return the template with a `strftime_now` that uses `today`; transformers' own uses the clock."""
    if "strftime_now" not in template:
        return template
    filled = "".join(f" | replace('%{code}', '{today.strftime(f'%{code}')}')" for code in "YymdbBaAHMSj")
    return "{%- macro strftime_now(format) -%}{{ format" + filled + " }}{%- endmacro %}" + template


def _message(message: Any, where: str) -> Mapping[str, Any]:
    if isinstance(message, Mapping):
        if "role" in message and message.keys() & {"content", "tool_calls", "function_call"}:
            return message  # a message that calls tools needs no content
        if "from" in message and "value" in message:
            role = message["from"]
            return {"role": SHAREGPT_ROLES.get(role, role), "content": message["value"]}
    has = ", ".join(message) if isinstance(message, Mapping) else type(message).__name__
    hint = 'messages look like {"role": "user", "content": "…"} or {"from": "human", "value": "…"}'
    raise QuantkitError(f"{where} holds a message without role and content (it has: {has})", hint, USAGE)
