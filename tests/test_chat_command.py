"""A conversation keeps what the model has seen, and answers as a model that begins anew each turn."""

import pytest
from chats import FORGETFUL, SAID, TEMPLATE, Fed, begin, converse, silent
from nights import by_day, nightly

from quantkit.errors import QuantkitError

KEPT = ["llama", "bloom", "mistral", "gemma3", "deepseek_v3"]
ANEW = ["mamba2", "jamba", "qwen3_next"]  # recurrent


@pytest.mark.parametrize("template", [FORGETFUL, *nightly(TEMPLATE)])
@pytest.mark.parametrize("family", by_day(KEPT, ["gemma3", "deepseek_v3"]))
def test_what_was_fed_is_not_fed_again(talker, family, template):
    """Up to where the prompt differs: the template rewrites history, or the answer has other tokens."""
    session = begin(talker(family, template), tokens=12)
    answers = converse(session, fed := Fed(session), [*SAID, "Lo!"])
    assert [answer.cached_tokens for answer in answers] == fed.kept() and all(fed.kept()[1:])
    assert not any(answer.notes for answer in answers)


@pytest.mark.parametrize("family", ANEW)
def test_what_cannot_be_gone_on_from_is_prefilled_anew_and_said(talker, family):
    session = begin(talker(family), tokens=4)
    answers = converse(session, Fed(session), SAID[:2])
    for answer in answers:
        assert (answer.cached_tokens, answer.prefilled_tokens) == (0, answer.prompt_tokens)
        assert answer.notes == ("the cache of this model cannot be continued: the whole prompt is prefilled",)
        assert answer.kv_bytes > 0


def test_a_window_that_has_moved_on_is_filled_anew_and_said(talker):
    session = begin(talker("gemma3"))
    fed = Fed(session)
    converse(session, fed, SAID[:2])
    session.system = "Ko."
    (answer,) = converse(session, fed, SAID[2:])
    assert answer.cached_tokens == 0 and answer.prefilled_tokens == answer.prompt_tokens
    assert answer.notes == (
        "a sliding window no longer holds the place of the change: the whole prompt is prefilled",
    )


def test_memory_is_that_of_keys_and_values(talker):
    """Of 3 layers, 2 heads of 16 values, in float32, of every token but the last."""
    session = begin(talker())
    for said in SAID:
        answer = session.say(said, silent)
        held = answer.prompt_tokens + answer.generated_tokens - 1
        assert answer.kv_bytes == 2 * 3 * 2 * 16 * 4 * held
    found = session.record("", answer)["memory_bytes"]
    parameters = session.engine._module.parameters()
    assert found["weights"] >= sum(p.numel() * 4 for p in parameters) and found["process"] > found["weights"]


def test_another_answer_has_another_seed_and_prefills_one_token(talker):
    session = begin(talker(), temperature=1.5, seed=7)
    first = [session.say(said, silent).text for said in SAID]
    again = session.again(silent)
    assert again.text != first[-1] and again.prefilled_tokens == 1
    assert [m["content"] for m in session.messages[1::2]] == [*first[:-1], again.text]
    other = begin(talker(), temperature=1.5, seed=7)
    assert [other.say(said, silent).text for said in SAID] == first
    assert begin(talker(), temperature=1.5, seed=8).say(SAID[0], silent).text != first[0]
    fresh = begin(talker())
    first = fresh.say(SAID[0], silent)
    again = fresh.again(silent)
    assert again.text == first.text and "without --temperature" in again.notes[0]
    fresh.messages.clear()
    with pytest.raises(QuantkitError, match="no answer to replace"):
        fresh.again(silent)


def test_raw_text_is_gone_on_with(talker):
    session = begin(talker(template=None), raw=True)
    fed = Fed(session)
    converse(session, fed, ["Kobu ridoma", "", " badeku"])
    tokenizer = session.engine._tokenizer
    assert fed.prompts[0] == tokenizer("Kobu ridoma")["input_ids"]
    begun = session.messages[:2]  # an empty line: it goes on where it stopped
    assert fed.prompts[1] == tokenizer("".join(message["content"] for message in begun))["input_ids"]
    with pytest.raises(QuantkitError, match="no text to continue"):
        begin(talker(template=None), raw=True).say("", silent)
    text = "".join(message["content"] for message in session.messages)
    assert text.startswith("Kobu ridoma") and " badeku" in text


# ---- a context that is full


def test_a_full_context_is_said_before_anything_is_computed(talker):
    session = begin(talker(), context=64, tokens=100)
    fed = Fed(session)
    first = session.say(SAID[0], silent)
    if first.stop != "context":
        pytest.fail("choose another seed: the model ends by itself")
    assert first.prompt_tokens + first.generated_tokens == 64
    assert first.notes == ("100% of the context of 64 tokens are used: /reset starts again",)
    before, calls = list(session.messages), len(fed.tokens)
    with pytest.raises(QuantkitError, match="no room for an answer in a context of 64") as caught:
        session.say(SAID[1], silent)
    assert caught.value.exit_code == 5 and "/reset" in caught.value.hint
    assert session.messages == before and len(fed.tokens) == calls
    session.messages.clear()
    again = session.say(SAID[0], silent)
    assert again.text == first.text and again.prefilled_tokens == 1


def test_transformers_stops_after_the_next_token(talker):
    session = begin(talker(), tokens=64)
    streamed: list[str] = []
    whole = session.say(SAID[0], streamed.append)
    assert "".join(streamed) == whole.text and len(streamed) > 8
    session.messages.clear()
    parts: list[str] = []

    def stream(text: str) -> None:
        parts.append(text)
        if len(parts) > 4:  # called for each token, with text once a word is complete
            session.stopped = True

    made = session.say(SAID[0], stream)
    assert made.stop == "interrupted" and 0 < made.generated_tokens < whole.generated_tokens
    assert whole.text.startswith(made.text) and "".join(parts) == made.text
    later = session.say(SAID[1], silent)
    assert later.cached_tokens >= made.prompt_tokens - 1
