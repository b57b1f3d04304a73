"""Conversations go through the model's own chat template, token by token as the template writes them."""

import hashlib
import json

import pytest
import torch

from quantkit.errors import USAGE, QuantkitError
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.options import CalibrationOptions
from quantkit.text import calibration, sources
from quantkit.text.chat import SHAREGPT_ROLES, ChatTemplate, Conversation, column_of

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
BOS, EOS = 0, 1
TALK = [{"role": "user", "content": "Wer da?"}, {"role": "assistant", "content": "Ich bin es. 안녕"}]
SHAREGPT = [{"from": "human", "value": "Wer da?"}, {"from": "gpt", "value": "Ich bin es. 안녕"}]


@pytest.fixture
def chat_model(tiny_model):
    def make(template: str | None = TEMPLATE, bos: bool = True) -> Checkpoint:
        folder = tiny_model("llama", tokenizer="bos" if bos else True, name=f"llama-{bos}")
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return open_checkpoint(str(folder))

    return make


@pytest.fixture
def write(tmp_path):
    def write(*rows: dict, name: str = "chats.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return str(path)

    return write


def load(checkpoint: Checkpoint, path: str, **options) -> calibration.CalibrationSet:
    return calibration.load(checkpoint, CalibrationOptions(calibration=path, **options))


def error_of(checkpoint: Checkpoint, path: str, **options) -> QuantkitError:
    with pytest.raises(QuantkitError) as caught:
        load(checkpoint, path, **options)
    return caught.value


def by_hand(checkpoint: Checkpoint) -> list[int]:
    """TALK through TEMPLATE without its BOS, put together from tokens of its parts."""
    encode = checkpoint.tokenizer.backend_tokenizer.encode
    spoken = [f"[{message['role']}] {message['content']}" for message in TALK]
    return [token for text in spoken for token in [*encode(text, add_special_tokens=False).ids, EOS]]


@pytest.mark.parametrize("row", [{"messages": TALK}, {"conversations": TALK}, {"conversations": SHAREGPT}])
def test_a_conversation_becomes_what_its_template_says(chat_model, write, row):
    checkpoint = chat_model()
    talk = by_hand(checkpoint)
    found = load(checkpoint, write({"id": 7, **row}), samples=1, seqlen=1 + len(talk))
    assert found.tokens.tolist() == [[BOS, *talk]]
    assert found.provenance.bos


def test_no_sequence_begins_with_two_bos(chat_model, write):
    checkpoint = chat_model()
    talk = by_hand(checkpoint)
    found = load(checkpoint, write(*[{"messages": TALK}] * 6), samples=3, seqlen=1 + 2 * len(talk))
    assert found.tokens.tolist() == [[BOS, *talk, *talk]] * 3  # nor does one stand in the middle


def test_a_bos_of_the_template_stays_where_the_tokenizer_adds_none(chat_model, write):
    checkpoint = chat_model(bos=False)
    talk = by_hand(checkpoint)
    found = load(checkpoint, write(*[{"messages": TALK}] * 4), samples=2, seqlen=2 * (1 + len(talk)))
    assert found.tokens.tolist() == [[BOS, *talk, BOS, *talk]] * 2
    assert not found.provenance.bos


def test_a_template_without_bos_gets_the_tokenizers(chat_model, write):
    checkpoint = chat_model(TEMPLATE.removeprefix("{{ bos_token }}"))
    talk = by_hand(checkpoint)
    found = load(checkpoint, write({"messages": TALK}), samples=1, seqlen=1 + len(talk))
    assert found.tokens.tolist() == [[BOS, *talk]]


def test_the_hash_of_the_template_is_recorded_where_it_was_used(chat_model, write):
    checkpoint = chat_model()
    expected = hashlib.sha256(TEMPLATE.encode()).hexdigest()
    chats, texts = write({"messages": TALK}), write({"text": "Nur ein Text."}, name="texts.jsonl")
    assert load(checkpoint, chats, samples=1, seqlen=8).record()["chat_template"] == expected
    assert load(checkpoint, texts, samples=1, seqlen=4).record()["chat_template"] is None


def test_text_goes_before_conversations_and_a_named_column_before_both(chat_model, write):
    checkpoint = chat_model()
    path = write({"text": "Nur ein Text.", "messages": TALK, "other": SHAREGPT})
    plain = load(checkpoint, path, samples=1, seqlen=4).tokens
    named = [
        load(checkpoint, path, text_column=name, samples=1, seqlen=9).tokens for name in ("messages", "other")
    ]
    assert plain[0, 1:].tolist() == checkpoint.tokenizer("Nur ein Text.")["input_ids"][1:4]
    assert torch.equal(*named) and named[0][0, 1:].tolist() == by_hand(checkpoint)[:8]


def test_the_column_of_conversations_is_taken_only_where_no_other_was_named():
    assert column_of(["id", "messages"], "text") == "messages"
    assert column_of(["conversations", "messages"], "text") == "messages"
    assert column_of(["text", "messages"], "text") == "text"
    assert column_of(["id", "messages"], "body") is None
    assert column_of(["id"], "text") is None


def test_a_template_that_prints_the_date_gives_the_same_tokens_tomorrow(chat_model, write):
    dated = "{% macro inside() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}"
    dated += "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}, {{ inside() }}{% endif %}"
    checkpoint = chat_model(dated + TEMPLATE)
    found = load(checkpoint, write({"messages": TALK}), samples=1, seqlen=40)
    assert checkpoint.tokenizer.decode(found.tokens[0, 1:]).startswith("26 Jul 2024, 2024-07-26<s>[user]")
    assert found.provenance.chat_template == hashlib.sha256((dated + TEMPLATE).encode()).hexdigest()


def test_a_model_without_template_takes_no_conversations(chat_model, write):
    error = error_of(chat_model(template=None), write({"messages": TALK}))
    assert error.exit_code == USAGE and "the model has no chat template" in error.message
    assert "chat_template.jinja" in error.hint


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user"}], "holds a message without role and content (it has: role)"),
        (["hello"], "holds a message without role and content (it has: str)"),
        ([], "does not fit the chat template: "),
        ([{"role": "judge", "content": "x"}], "does not fit the chat template: no judges here"),
    ],
)
def test_a_conversation_that_does_not_fit_is_named(chat_model, write, messages, words):
    refusing = "{% if messages[0].role == 'judge' %}{{ raise_exception('no judges here') }}{% endif %}"
    path = write({"messages": messages})
    error = error_of(chat_model(refusing + TEMPLATE), path)
    assert error.message.startswith(f"{path}:1 {words}")
    assert error.exit_code == USAGE and error.hint


LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "lookup", "arguments": {"word": "Wer"}}}


@pytest.mark.parametrize("unsaid", [{}, {"content": None}])
@pytest.mark.parametrize("tools", [[LOOKUP], json.dumps([LOOKUP]), [json.dumps(LOOKUP)]])
def test_tools_and_messages_that_call_them_reach_the_template(chat_model, write, unsaid, tools):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    template += "{{ m.tool_calls | tojson if m.tool_calls }}{{ '' + m.content }}{% endfor %}"
    checkpoint = chat_model(template)
    path = write(
        {"messages": [TALK[0], {"role": "assistant", "tool_calls": [CALL], **unsaid}], "tools": tools}
    )
    (found,) = sources.open_source(CalibrationOptions(calibration=path), True, 8).documents
    expected = json.dumps([LOOKUP]) + "[user]Wer da?[assistant]" + json.dumps([CALL])
    assert ChatTemplate(checkpoint.tokenizer).render(found) == expected


def test_null_is_no_text_and_no_key_except_where_a_template_asks_for_it(chat_model):
    talk = Conversation(
        [{"role": "assistant", "content": None, "x": None, "parts": [{"image": None}]}], "here"
    )
    shown = "{% for m in messages %}{{ m.content }}{{ 'x' in m }}{{ m.parts }}{% endfor %}"
    assert ChatTemplate(chat_model(shown).tokenizer).render(talk) == "False[{}]"
    asking = "{% for m in messages %}{{ 'call' if m['content'] is none else 'text' }}{% endfor %}"
    assert ChatTemplate(chat_model(asking).tokenizer).render(talk) == "call"


def test_tools_choose_their_own_template(chat_model):
    tokenizer = chat_model().tokenizer
    tokenizer.chat_template = {"default": "D", "tool_use": "T"}
    assert ChatTemplate(tokenizer).render(Conversation(TALK, "here")) == "D"
    assert ChatTemplate(tokenizer).render(Conversation(TALK, "here", [LOOKUP])) == "T"


def test_tools_that_are_no_schemas_are_refused(chat_model, write):
    error = error_of(chat_model(), path := write({"messages": TALK, "tools": ["hammer"]}))
    assert error.message.startswith(f"tools of {path}:1 is not JSON") and error.exit_code == USAGE
    error = error_of(chat_model(), path := write({"messages": TALK, "tools": 7}))
    assert error.message == f"{path}:1 has tools that are no list of JSON objects"


def test_other_roles_mean_themselves(chat_model, write):
    checkpoint = chat_model()
    rows = [{"conversations": [{"from": "system", "value": "Kurz."}]}]
    found = load(checkpoint, write(*rows), samples=1, seqlen=12)
    assert checkpoint.tokenizer.decode(found.tokens[0]).startswith("<s>[system] Kur")
    assert set(SHAREGPT_ROLES.values()) == {"user", "assistant"}
