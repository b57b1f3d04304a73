"""Conversations with tiny models, and everything that is fed to them."""

from pathlib import Path

import torch

from quantkit.evaluation.generate import equal_beginning
from quantkit.evaluation.sampling import Sampling
from quantkit.models.files.open import open_checkpoint
from quantkit.serving.chat.session import Answer, ChatSession
from quantkit.serving.chat.settings import ChatSettings
from quantkit.serving.chat.transformers import TransformersChat

TURNS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
NEXT = "{% if add_generation_prompt %}[assistant] {% endif %}"
TEMPLATE = TURNS + NEXT
# Of former answers the first letters only, as others leave out what a model thought.
FORGETFUL = TURNS.replace("m.content", "(m.content[:4] if m.role == 'assistant' else m.content)") + NEXT
SAID = ["Kobu ridoma", "Badeku, 안녕", "Mi ta no?"]


def silent(text: str) -> None:
    """Streams nowhere."""


def begin(
    folder: Path, context: int = 256, tokens: int = 8, raw: bool = False, system: str = "", **sampling
) -> ChatSession:
    """A session in float32 that takes the likeliest token."""
    engine = TransformersChat(open_checkpoint(str(folder)), ChatSettings("float32"), context)
    return ChatSession(engine, Sampling(tokens, **sampling), system, raw)


class Fed:
    """Every prompt that a session encodes, and the tokens of every call of its model."""

    def __init__(self, session: ChatSession):
        engine = session.engine
        self.model, self.tokens, self.prompts, self.answers = engine._module, [], [], []
        self._begin = engine._kept.begin
        engine._kept.begin = self._note
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _note(self, ids):
        self.prompts.append(ids)
        return self._begin(ids)

    def _count(self, module, args, named) -> None:
        self.tokens.append(named["input_ids"].numel())

    def kept(self) -> list[int]:
        """How many tokens at the beginning of each prompt were fed before."""
        texts = [prompt + answer for prompt, answer in zip(self.prompts, self.answers, strict=True)]
        pairs = zip(texts, self.prompts[1:], strict=False)
        return [0, *(equal_beginning(text[:-1], prompt[:-1]) for text, prompt in pairs)]

    def anew(self, ids: list[int], tokens: int, ends: list[int]) -> list[int]:
        """What the model answers without anything that was kept."""
        given = torch.tensor([ids])
        out = self.model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False,
            eos_token_id=ends, pad_token_id=0,
        )  # fmt: skip
        return out[0, len(ids) :].tolist()


def converse(session: ChatSession, fed: Fed, said: list[str]) -> list[Answer]:
    """Say it all; each answer is the one that is given anew, token by token."""
    answers = []
    for text in said:
        before = len(fed.tokens)
        answers.append(session.say(text, silent))
        counted = fed.tokens[before:]
        assert counted == [answers[-1].prefilled_tokens, *[1] * (answers[-1].generated_tokens - 1)]
        room = session.engine.context - len(fed.prompts[-1])
        tokens = min(session.sampling.tokens, room)
        expected = fed.anew(fed.prompts[-1], tokens, session.engine._ends)
        del fed.tokens[before + len(counted) :]
        tokenizer = session.engine._tokenizer
        assert answers[-1].text == tokenizer.decode(expected, skip_special_tokens=True)
        assert answers[-1].generated_tokens == len(expected)
        fed.answers.append(expected)
        assert answers[-1].cached_tokens + answers[-1].prefilled_tokens == len(fed.prompts[-1])
    return answers
