"""A conversation as token ids that begin with those a model has seen, wherever its text does.

Text that a model wrote may be cut otherwise when it is read: [he][llo] comes back as [hello]. Then nothing
from there on would be in the cache. So what the model wrote keeps the tokens it chose, and only what follows
is cut anew.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import date
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.evaluation.generate import decode
from quantkit.serving.chat.turn import Prompt
from quantkit.text.chat import ChatTemplate, Conversation


def written(template: ChatTemplate, prompt: Prompt) -> str:
    """Return the text of a prompt, up to where the answer begins.

    Raises QuantkitError when it does not fit the template.
    """
    if isinstance(prompt, str):
        return prompt
    try:
        return template.render(Conversation(list(prompt), "the conversation"), answer=True)
    except QuantkitError as error:
        hint = "some take no system message (/system takes it away) or other turns; /reset begins anew"
        raise QuantkitError(error.message, hint, error.exit_code) from error


class Tokens:
    """Of one conversation, turn after turn. ends: ids that end an answer; templates write them themselves."""

    def __init__(self, tokenizer: Any, template: str | None, today: date, ends: Collection[int]):
        self._tokenizer, self._ends = tokenizer, ends
        self._template = ChatTemplate(tokenizer, template, today)
        self._asked = ""  # text of the prompt that was encoded last
        self._known: list[tuple[str, list[int]]] = []  # the text after each answer, and its tokens

    def encode(self, prompt: Prompt) -> list[int]:
        """The whole conversation, up to where the answer begins.

        Raises QuantkitError when it does not fit the template.
        """
        raw = isinstance(prompt, str)
        text = written(self._template, prompt)
        ids = self._tokenizer(text, add_special_tokens=raw)["input_ids"]
        self._asked = text
        while self._known and not text.startswith(self._known[-1][0]):
            self._known.pop()  # taken back, or written anew
        if self._known:
            known, before = self._known[-1]
            rest = self._tokenizer(text[len(known) :], add_special_tokens=False)["input_ids"]
            if self._spelled([*before, *rest]) == self._spelled(ids):  # some begin every text with a space
                return [*before, *rest]
        return ids

    def answered(self, ids: list[int], answer: list[int]) -> str:
        """The text of an answer to the prompt `ids`, whose tokens the next turn will go on from."""
        text = decode(self._tokenizer, answer)
        body = answer[:-1] if answer and answer[-1] in self._ends else answer
        if self._spelled(body) == text:  # neither is a special token among them, nor half a character
            self._known.append((self._asked + text, [*ids, *body]))
        return text

    def _spelled(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
