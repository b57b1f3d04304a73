"""A conversation keeps what the model has seen: every token is fed to it once, and answers are those of a
model that begins anew each turn."""

import io
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import transformers

from quantkit.cli import talk
from quantkit.errors import QuantkitError
from quantkit.evaluation.sampling import Sampling
from quantkit.models.open import open_checkpoint
from quantkit.options import CalibrationOptions
from quantkit.serving.chat import commands, start
from quantkit.serving.chat.conversation import Conversation
from quantkit.serving.chat.session import Session
from quantkit.serving.chat.through_transformers import TransformersChat
from quantkit.serving.chat.turn import Answer, Facts
from quantkit.serving.context import ContextFullError
from quantkit.text import calibration

TURNS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
NEXT = "{% if add_generation_prompt %}[assistant] {% endif %}"
TEMPLATE = TURNS + NEXT
# Of former answers the first letters only, as others leave out what a model thought.
FORGETFUL = TURNS.replace("m.content", "(m.content[:4] if m.role == 'assistant' else m.content)") + NEXT
SAID = ["Kobu ridoma", "Badeku, 안녕", "Mi ta no?"]
KEPT = ["llama", "bloom", "mistral", "gemma3", "gemma4", "deepseek_v3", "qwen3_next", "olmo_hybrid"]
ANEW = ["mamba2", "jamba", "glm_moe_dsa"]  # no attention; several tokens at once lose the state; an index


def silent(text: str) -> None:
    """Streams nowhere."""


@pytest.fixture
def chat_model(tiny_model):
    """`chat_model("gemma3")`: a folder with tokenizer and chat template."""

    def make(family: str = "llama", template: str | None = TEMPLATE, **arguments) -> Path:
        folder = tiny_model(family, tokenizer="bos", **arguments)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


def begin(folder: Path, context: int = 256, tokens: int = 8, raw: bool = False, **options) -> Session:
    """A session in float32 that takes the likeliest token."""
    options, sampling = dict(options), {"tokens": tokens}
    for name in ("temperature", "seed", "top_k"):
        if name in options:
            sampling[name] = options.pop(name)
    engine = TransformersChat(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"), context)
    return Session(
        engine, Conversation(raw=raw, system=options.pop("system", "")), Sampling(**sampling), **options
    )


class Fed:
    """Every prompt that a session encodes, and the tokens of every call of its model."""

    def __init__(self, session: Session):
        engine = session.engine
        self.model, self.tokens, self.prompts = engine._model, [], []
        self._encode = engine._tokens.encode
        engine._tokens.encode = self._note
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _note(self, prompt) -> list[int]:
        self.prompts.append(self._encode(prompt))
        return self.prompts[-1]

    def _count(self, module, args, named) -> None:
        self.tokens.append(named["input_ids"].numel())

    def anew(self, ids: list[int], tokens: int, ends: list[int]) -> list[int]:
        """What the model answers without anything that was kept."""
        given = torch.tensor([ids])
        out = self.model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False,
            eos_token_id=ends, pad_token_id=0,
        )  # fmt: skip
        return out[0, len(ids) :].tolist()


def converse(session: Session, fed: Fed, said: list[str]) -> list[Answer]:
    """Say it all; each answer is the one that is given anew, token by token."""
    answers = []
    for text in said:
        before = len(fed.tokens)
        answers.append(session.say(text, silent))
        counted = fed.tokens[before:]
        assert counted == [answers[-1].prefilled_tokens, *[1] * (answers[-1].generated_tokens - 1)]
        room = session.engine.facts.context - len(fed.prompts[-1])
        tokens = min(session.sampling.tokens, room)
        expected = fed.anew(fed.prompts[-1], tokens, session.engine._ends)
        del fed.tokens[before + len(counted) :]
        tokenizer = session.engine._tokenizer
        assert answers[-1].text == tokenizer.decode(expected, skip_special_tokens=True)
        assert answers[-1].generated_tokens == len(expected)
        assert answers[-1].cached_tokens + answers[-1].prefilled_tokens == len(fed.prompts[-1])
    return answers


@pytest.mark.parametrize("family", KEPT)
def test_every_token_is_fed_once(chat_model, family):
    session = begin(chat_model(family))
    fed = Fed(session)
    answers = converse(session, fed, SAID)
    last = answers[-1]
    assert sum(fed.tokens) == last.prompt_tokens + last.generated_tokens - 1
    for former, later in zip(answers, answers[1:], strict=False):
        ended = former.stop == "end"
        assert later.cached_tokens == former.prompt_tokens + former.generated_tokens - 1
        assert later.dropped_tokens == 0 and not later.notes or ended
    assert not any(answer.notes for answer in answers)


@pytest.mark.parametrize("family", ANEW)
def test_what_cannot_be_gone_on_from_is_prefilled_anew_and_said(chat_model, family):
    session = begin(chat_model(family), tokens=4)
    answers = converse(session, Fed(session), SAID[:2])
    for answer in answers:
        assert (answer.cached_tokens, answer.prefilled_tokens) == (0, answer.prompt_tokens)
        assert answer.notes == ("this model's cache cannot be gone on from: all is prefilled anew",)
        assert answer.kv_bytes > 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_where_the_template_rewrites_history_the_cache_is_cropped(chat_model, family):
    session = begin(chat_model(family, FORGETFUL), tokens=12)
    answers = converse(session, fed := Fed(session), [*SAID, "Lo!"])
    held = 0
    for place, answer in enumerate(answers):
        prompt = fed.prompts[place]
        shared = 0
        if place:
            former = fed.prompts[place - 1] + fed.anew(fed.prompts[place - 1], 12, session.engine._ends)
            shared = next(k for k, (a, b) in enumerate(zip(former, prompt, strict=False)) if a != b)
            assert answer.dropped_tokens == held - shared > 0
        assert answer.cached_tokens == shared
        held = len(prompt) + answer.generated_tokens - 1
    assert not any(answer.notes for answer in answers)


def test_a_window_that_has_moved_on_is_filled_anew_and_said(chat_model):
    session = begin(chat_model("gemma3"))
    fed = Fed(session)
    converse(session, fed, SAID[:2])
    session.conversation.system = "Ko."
    (answer,) = converse(session, fed, SAID[2:])
    assert answer.cached_tokens == 0 and answer.prefilled_tokens == answer.prompt_tokens
    assert answer.notes == ("a sliding window has lost what this turn goes back to: all is prefilled anew",)


def test_the_state_of_a_recurrence_is_not_taken_back(chat_model):
    session = begin(chat_model("qwen3_next", FORGETFUL))
    answers = converse(session, Fed(session), SAID[:2])
    assert [answer.cached_tokens for answer in answers] == [0, 0] and answers[1].dropped_tokens > 0
    assert answers[1].notes == ("the state of a recurrence cannot be taken back: all is prefilled anew",)


def test_memory_is_that_of_keys_and_values(chat_model):
    """Of 3 layers, 2 heads of 16 values, in float32, of every token but the last."""
    session = begin(chat_model())
    for said in SAID:
        answer = session.say(said, silent)
        held = answer.prompt_tokens + answer.generated_tokens - 1
        assert answer.kv_bytes == 2 * 3 * 2 * 16 * 4 * held
    found = session.memory(answer)
    parameters = session.engine._model.parameters()
    assert found["weights"] >= sum(p.numel() * 4 for p in parameters) and found["process"] > found["weights"]


def test_another_answer_has_another_seed_and_prefills_one_token(chat_model):
    session = begin(chat_model(), temperature=1.5, seed=7)
    first = [session.say(said, silent).text for said in SAID]
    again = session.again(silent)
    assert again.text != first[-1] and again.prefilled_tokens == 1
    assert [m["content"] for m in session.conversation.messages[1::2]] == [*first[:-1], again.text]
    other = begin(chat_model(), temperature=1.5, seed=7)
    assert [other.say(said, silent).text for said in SAID] == first
    assert begin(chat_model(), temperature=1.5, seed=8).say(SAID[0], silent).text != first[0]
    fresh = begin(chat_model())
    first = fresh.say(SAID[0], silent)
    again = fresh.again(silent)
    assert again.text == first.text and "see --temperature" in again.notes[0]
    fresh.reset()
    with pytest.raises(QuantkitError, match="no answer to give again"):
        fresh.again(silent)


def test_raw_text_is_gone_on_with(chat_model):
    session = begin(chat_model(template=None), raw=True)
    fed = Fed(session)
    converse(session, fed, ["Kobu ridoma", "", " badeku"])
    tokenizer = session.engine._tokenizer
    assert fed.prompts[0] == tokenizer("Kobu ridoma")["input_ids"]
    assert len(fed.prompts[1]) == len(fed.prompts[0]) + 8  # an empty line: it goes on where it stopped
    with pytest.raises(QuantkitError, match="no text to go on from"):
        begin(chat_model(template=None), raw=True).say("", silent)
    text = session.conversation.prompt()
    assert text.startswith("Kobu ridoma") and " badeku" in text


# ---- a context that is full


def test_a_full_context_is_said_before_anything_is_computed(chat_model):
    session = begin(chat_model(), context=64, tokens=100)
    fed = Fed(session)
    first = session.say(SAID[0], silent)
    if first.stop != "context":
        pytest.fail("choose another seed: the model ends by itself")
    assert first.prompt_tokens + first.generated_tokens == 64
    assert first.notes == (
        "the context of 64 tokens is full: /reset begins anew, --drop-oldest would forget",
    )
    before, calls = list(session.conversation.messages), len(fed.tokens)
    with pytest.raises(ContextFullError, match="there is no room for an answer") as caught:
        session.say(SAID[1], silent)
    assert caught.value.context == 64 < caught.value.tokens and "/reset" in caught.value.hint
    assert session.conversation.messages == before and len(fed.tokens) == calls
    session.reset()
    again = session.say(SAID[0], silent)
    assert again.text == first.text and again.cached_tokens == 0


def test_the_oldest_turns_are_dropped_where_asked_for(chat_model):
    session = begin(chat_model(), context=128, tokens=16, drop_oldest=True, system="Ko.")
    fed = Fed(session)
    answers = converse(session, fed, SAID * 2)
    notes = [note for answer in answers for note in answer.notes]
    assert notes and set(notes) <= {f"for want of context {n} messages dropped" for n in (2, 4)}
    assert all(answer.generated_tokens == 16 for answer in answers if answer.stop == "length")
    assert "context" not in {answer.stop for answer in answers}
    messages = session.conversation.messages
    assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
    assert session.conversation.system == "Ko." and messages[-2]["content"] == SAID[-1]
    with pytest.raises(ContextFullError):  # what was just said is never dropped
        session.say("Kobu " * 128, silent)


# ---- files and commands


def test_what_is_saved_is_calibrated_on_and_gone_on_with(chat_model, tmp_path):
    path, folder = tmp_path / "talk.jsonl", chat_model()
    session = begin(folder, system="Ko.")
    first = session.say(SAID[0], silent)
    assert commands.obey(f"/save {path}", session) == f"saved; {path} holds 1 conversation"
    session.say(SAID[1], silent)
    session.conversation.save(path)  # longer than that in the file, which it replaces
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"messages": session.conversation.prompt()}]
    assert rows[0]["messages"][:3] == [
        {"role": "system", "content": "Ko."},
        {"role": "user", "content": SAID[0]},
        {"role": "assistant", "content": first.text},
    ]
    found = calibration.load(
        session_checkpoint := open_checkpoint(str(folder)),
        CalibrationOptions(calibration=str(path), samples=1, seqlen=24),
    )
    rendered = session_checkpoint.tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False)
    assert (
        found.tokens[0].tolist()
        == session_checkpoint.tokenizer(rendered, add_special_tokens=False)["input_ids"][:24]
    )
    other = begin(folder)
    assert commands.obey(f"/load '{path}'", other) == f"4 messages of {path}"
    assert other.conversation == session.conversation
    fed = Fed(other)
    converse(other, fed, SAID[2:])
    rows[0]["messages"].append({"role": "user", "content": SAID[2]})
    tokenizer = open_checkpoint(str(folder)).tokenizer
    assert tokenizer.decode(fed.prompts[-1]) == tokenizer.apply_chat_template(
        rows[0]["messages"], tokenize=False, add_generation_prompt=True
    )
    other.reset()
    other.say("Lo!", silent)
    assert other.conversation.save(path) == 2


@pytest.mark.parametrize("text", ["no json", '{"other": 1}', '["messages"]', '{"messages": "x"}'])
def test_other_files_are_left_alone(tmp_path, text):
    path = tmp_path / "file.jsonl"
    path.write_text(text)
    talk_ = Conversation(messages=[{"role": "user", "content": "x"}])
    for action in (talk_.save, talk_.load):
        with pytest.raises(QuantkitError, match="holds other things than conversations"):
            action(path)
    assert path.read_text() == text
    path.write_text('{"messages": [{"role": "tool", "content": "x"}]}\n')
    with pytest.raises(QuantkitError, match="none of system, user or assistant"):
        talk_.load(path)
    path.write_text('{"text": "x"}\n')
    with pytest.raises(QuantkitError, match="holds no conversation"):
        talk_.load(path)
    with pytest.raises(QuantkitError, match="is no file"):
        talk_.save(tmp_path)
    with pytest.raises(QuantkitError, match="nothing was said yet"):
        Conversation().save(path)


def test_messages_of_several_lines_stand_between_quotes():
    lines = iter(["one", '"""', "two", "", "three", '"""', '"""four"""', '"""five', "six"])

    def read(more: bool) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    assert list(commands.messages(read)) == ["one", "two\n\nthree", "four", "five\nsix"]


def test_sampling_is_as_recommended_unless_asked_otherwise():
    recommended = {"temperature": 0.6, "top_k": 20.0, "top_p": 0.95}
    chosen = start.sampling(recommended, 8, 0, temperature=None, top_k=None, top_p=None)
    assert chosen == Sampling(8, 0.6, 0, 20, 0.95)
    assert start.sampling(recommended, 8, 0, top_k=5) == Sampling(8, 0.6, 0, 5, 0.95)
    assert start.sampling(recommended, 8, 0, temperature=0.0) == Sampling(8)
    assert start.sampling({}, 8, 3) == Sampling(8, seed=3)
    with pytest.raises(QuantkitError, match="for sampling"):
        start.sampling({}, 8, 0, top_k=5)


# ---- the command


@pytest.fixture
def pipe(quantkit, monkeypatch):
    """`pipe("Hello\\n", folder, ...)`: what the command makes of stdin."""

    def run(text: str, *arguments):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return quantkit("chat", *arguments)

    return run


def test_a_line_of_json_per_answer(chat_model, pipe):
    folder = chat_model()
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.7}))
    done = pipe(f"{SAID[0]}\n\n/system Ko.\n//x\n/retry\n/exit\nnever\n", folder, "--json", "-q", "-n", 6)
    assert (done.code, done.err) == (0, "")
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [row["said"] for row in rows] == [SAID[0], "/x", "/retry"]
    assert [row["schema"] for row in rows] == ["quantkit.chat/1"] * 3
    assert [row["sampling"]["seed"] for row in rows] == [0, 1, 2] and rows[0]["sampling"][
        "temperature"
    ] == 0.7
    tokens = rows[2]["tokens"]
    assert tokens["cached"] + tokens["prefilled"] == tokens["prompt"] == rows[1]["tokens"]["prompt"]
    assert rows[0]["memory_bytes"]["kv_cache"] > 0 and rows[0]["model"]["context"] == 256


def test_what_is_printed(chat_model, pipe, monkeypatch):
    folder = chat_model()
    done = pipe(f"{SAID[0]}\n/reset\n", folder, "-n", 6, "--dtype", "float32")
    text = begin(folder, tokens=6).say(SAID[0], silent).text
    assert done.out == text + "\n"
    assert "float32 on cpu, 256 tokens of context; the likeliest token, always" in done.err
    assert " prefilled " in done.err and "KV cache" in done.err and "begun anew" in done.err


def test_answers_cannot_steer_the_terminal(capsys, monkeypatch):
    session = Session(Written("a\x1b[31mb\x9bc"), Conversation(), Sampling())
    assert talk.take(session, talk.Terminal(quiet=True), "x")
    assert capsys.readouterr().out == "a\ufffd[31mb\ufffdc\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("-n 0", 2, "-n 0 makes no sense"),
        ("--temperature nan", 2, "--temperature nan"),
        ("--ctx none", 2, "--ctx none makes no sense"),
        ("--kv-dtype q8_0", 4, "--kv-dtype is for GGUF files"),
        ("--engine llama.cpp", 4, "llama.cpp runs GGUF files"),
        ("--template none.jinja", 3, "--template none.jinja cannot be read"),
        ("--load none.jsonl", 3, "none.jsonl cannot be read"),
        ("--raw --template x", 2, "a raw text needs no --template"),
    ],
)
def test_what_makes_no_sense(refuse, chat_model, arguments, code, words):
    assert words in refuse(code, "chat", chat_model(), *arguments.split())[0]


def test_errors_end_what_nobody_types(chat_model, pipe):
    folder = chat_model()
    for text, words in (("/no\n", "there is no /no"), ("/save\n", "/save needs a file")):
        done = pipe(text, folder, "-q")
        assert done.code == 2 and done.err.startswith(f"error: {words}")
    done = pipe("x\n", chat_model(template=None, name="bare"), "-q")
    assert done.code == 2 and "has no chat template\nhint: give one with --template FILE" in done.err
    folder = chat_model(template="{{ raise_exception('no ' + messages[0].role) }}", name="refuses")
    done = pipe("x\n", folder, "-q")
    assert "the conversation does not fit the model's chat template: no user\nhint: some take" in done.err


def test_more_than_the_model_was_made_for_is_a_warning(chat_model, pipe):
    done = pipe("", chat_model(), "--ctx", "1k", "-q")
    assert done.code == 0 and "was made for 256 tokens, --ctx is 1,024" in done.err


# ---- Ctrl-C


class Written:
    """An engine that answers with the same text, letter by letter, until it is stopped."""

    def __init__(self, text: str, during=lambda letter: None):
        self.text, self.during = text, during
        self.facts = Facts("written", "none", "none", "cpu", "float32", 100, 0)

    def answer(self, prompt, sampling, stream, stopped) -> Answer:
        said = ""
        for letter in self.text:
            stream(letter)
            said += letter
            self.during(letter)
            if stopped():
                break
        stop = "interrupted" if stopped() else "end"
        return Answer(said, 1, 0, 1, 0, len(said), 0.1, 0.1, stop, None)

    def forget(self) -> None:
        """Nothing is kept."""


@pytest.fixture
def interruptible():
    """SIGINT as a terminal has it, whatever started the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(times: int, at: str):
    def during(letter: str) -> None:
        if letter == at:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    return during


@pytest.fixture
def typed(monkeypatch):
    """A terminal whose user types."""
    terminal = talk.Terminal()
    terminal.typed = True
    return terminal


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(interruptible, typed, capsys):
    session = Session(Written("abcdef", interrupt(1, "c")), Conversation(), Sampling())
    assert talk.take(session, typed, "x")
    assert session.conversation.messages[-1] == {"role": "assistant", "content": "abc"}
    shown = capsys.readouterr()
    assert shown.out == "abc\n" and ", interrupted" in shown.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    session.engine.during = interrupt(0, "")
    assert talk.take(session, typed, "y")  # the next answer is whole
    assert session.conversation.messages[-1]["content"] == "abcdef"


def test_a_second_ctrl_c_drops_the_answer(interruptible, typed, capsys):
    session = Session(Written("abcdef", interrupt(2, "c")), Conversation(), Sampling())
    assert talk.take(session, typed, "x")
    assert session.conversation.messages == [] and "the answer was dropped" in capsys.readouterr().err


def test_ctrl_c_ends_what_nobody_types(interruptible, typed):
    typed.typed = False
    session = Session(Written("abcdef", interrupt(1, "c")), Conversation(), Sampling())
    with pytest.raises(KeyboardInterrupt):
        talk.take(session, typed, "x")


def test_transformers_stops_after_the_next_token(chat_model):
    session = begin(chat_model(), tokens=64)
    streamed: list[str] = []
    whole = session.say(SAID[0], streamed.append)
    assert "".join(streamed) == whole.text and len(streamed) > 8
    session.reset()
    parts: list[str] = []

    def stream(text: str) -> None:
        parts.append(text)
        if len("".join(parts)) > 4:
            session.stop()

    made = session.say(SAID[0], stream)
    assert made.stop == "interrupted" and 0 < made.generated_tokens < whole.generated_tokens
    assert whole.text.startswith(made.text) and "".join(parts) == made.text
    later = session.say(SAID[1], silent)
    assert later.cached_tokens == made.prompt_tokens + made.generated_tokens - 1
    assert isinstance(session.engine._model, transformers.PreTrainedModel)
