"""A conversation through llama.cpp: what it says it has prefilled is what is new."""

import io
import json

import gguf_files
import jobs
import pytest
from chats import FORGETFUL, NEXT, SAID, TURNS, silent
from nights import by_day

from quantkit.errors import QuantkitError
from quantkit.evaluation.sampling import Sampling
from quantkit.models.files import gguf_file
from quantkit.models.files.open import open_checkpoint
from quantkit.serving.chat.session import ChatSession
from quantkit.serving.chat.settings import ChatSettings
from quantkit.serving.chat.start import start
from quantkit.serving.engines import choose, llamacpp

TEMPLATE = TURNS + NEXT
TALE = ["Once upon a time", "What did she say?", "And then?"]  # which the demo model goes on from


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    """The demo model in one file. It has no chat template."""
    pytest.importorskip("xllamacpp")
    path = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    jobs.quantize("gguf", demo_model, path, {"type": ("Q8_0",), "solver": "rtn", "imatrix": "none"})
    return path


@pytest.fixture
def begin(model, tmp_path):
    """`begin(context=256)`: a session, ended after the test."""
    started = []

    def make(template: str = TEMPLATE, tokens: int = 12, **asked) -> ChatSession:
        path = tmp_path / "template.jinja"
        path.write_text(template)
        given = {"template": None if asked.get("raw") else path, "tokens": tokens, "temperature": 0.0}
        made = start(str(model), ChatSettings(threads=1, **given, **asked))
        started.append(made.engine)
        return made

    yield make
    for engine in started:
        engine.close()


def test_only_what_is_new_is_prefilled(begin, model):
    session = begin()
    tokenizer = open_checkpoint(str(model)).tokenizer
    answers = []
    for said in TALE:
        answers.append(session.say(said, silent))
        messages = session.messages[:-1]
        text = "<|endoftext|>" + "".join(f"[{m['role']}] {m['content']}<|endoftext|>" for m in messages)
        prompt = tokenizer(f"{text}[assistant] ", add_special_tokens=False)["input_ids"]
        assert answers[-1].prompt_tokens == len(prompt)
        assert answers[-1].cached_tokens + answers[-1].prefilled_tokens == len(prompt)
    for former, later in zip(answers, answers[1:], strict=False):
        assert later.cached_tokens == former.prompt_tokens + former.generated_tokens - 1
    last = answers[-1]
    fed = sum(answer.prefilled_tokens + answer.generated_tokens - 1 for answer in answers)
    assert fed == last.prompt_tokens + last.generated_tokens - 1


def test_history_that_is_written_anew_is_prefilled_from_there(begin):
    session = begin(FORGETFUL)
    former = session.say(TALE[0], silent)
    later = session.say(TALE[1], silent)
    assert former.prompt_tokens <= later.cached_tokens < former.prompt_tokens + former.generated_tokens - 1


def test_what_it_streams_is_the_answer_and_stops_when_asked(begin):
    session = begin()
    parts: list[str] = []
    whole = session.say(TALE[0], parts.append)
    assert "".join(parts) == whole.text and whole.stop == "length" and whole.generated_tokens == 12
    session.messages.clear()
    made = session.say(TALE[0], lambda text: setattr(session, "stopped", True))
    assert made.stop == "interrupted" and 0 < made.generated_tokens < 12 and whole.text.startswith(made.text)


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_what_stops_the_stream_ends_the_answer(begin, error):
    session, parts = begin(), []

    def stream(text: str) -> None:
        parts.append(text)
        raise error

    with pytest.raises(error):
        session.say(TALE[0], stream)
    assert len(parts) == 1 and session.messages == []
    assert session.say(TALE[0], silent).generated_tokens == 12


def test_thoughts_are_part_of_the_answer(begin, model):
    """llama.cpp would take what stands between its tags out of it."""
    session = begin(TEMPLATE + "<think>\n")
    assert session.say(TALE[0], silent).text and session.messages[-1]["content"]


def test_raw_text_and_a_context_that_is_full(begin):
    session = begin(raw=True, tokens=400, ctx=200)
    assert session.engine.context == 256  # llama.cpp rounds up
    session.messages.append({"role": "user", "content": "Lily"})
    with pytest.raises(QuantkitError, match="no room for an answer in a context of 256"):
        session.say(" and Tom" * 200, silent)
    assert session.messages == [{"role": "user", "content": "Lily"}]
    assert session.say(" was", silent).text


def test_memory_and_what_is_recommended(begin, model):
    session = begin(kv_dtype="q8_0")
    _, infos = gguf_file.read_header(model)
    assert session.engine.facts.weight_bytes == sum(info.nbytes for info in infos.values())
    made = session.say("x", silent)
    per_token = 6 * 2 * 2 * 64 * 34 // 32  # 6 layers, keys and values of 2 heads of 64 values
    assert made.kv_bytes == 512 * per_token


def test_what_the_file_recommends_is_taken(tiny_model, tmp_path):
    pytest.importorskip("xllamacpp")
    keys = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}
    path = gguf_files.export(
        tiny_model("llama"), tmp_path / "m.gguf", extra={**keys, "tokenizer.chat_template": "x"}
    )
    session = start(str(path), ChatSettings(threads=1, tokens=8))
    session.engine.close()
    assert session.sampling == Sampling(8, pytest.approx(0.6), 0, 20, pytest.approx(0.95))


def test_without_a_template_it_says_so(model, refuse):
    error, hint = refuse(2, "chat", model)
    assert error.endswith("has no chat template") and "--raw" in hint
    assert "computes in the types of the file" in refuse(2, "chat", model, "--dtype", "float32")[0]


RUNAWAYS = {
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}": "it calls itself without end",
    "{{ 'x' * 4000000000 }}": "it took more than 256 MiB of memory",
}


@pytest.mark.parametrize("template", by_day(RUNAWAYS, [*RUNAWAYS][:1]))
def test_a_template_that_runs_away_is_stopped(tiny_model, tmp_path, quantkit, monkeypatch, template):
    """llama.cpp, which would run it as it loads the file and again for every answer, never does."""
    pytest.importorskip("xllamacpp")
    path = gguf_files.export(
        tiny_model("llama"), tmp_path / "m.gguf", extra={"tokenizer.chat_template": template}
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("x\n"))
    done = quantkit("chat", path, "-q")
    assert done.code == 4 and f"chat template was stopped: {RUNAWAYS[template]}\nhint: " in done.err
    llamacpp.LlamaCppServer(llamacpp.parameters(path, 64, 1)).close()


def test_a_template_that_is_none_is_refused(model, quantkit, monkeypatch, tmp_path):
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}")
    monkeypatch.setattr("sys.stdin", io.StringIO("x\n"))
    done = quantkit("chat", model, "--template", tmp_path / "broken.jinja", "-q")
    assert done.code == 2 and "does not fit the chat template: " in done.err


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("template", "begun"), [("{{ bos_token }}ab", True), ("ab", False)])
def test_a_text_begins_with_one_bos(tiny_model, tmp_path, template, begun, adds):
    pytest.importorskip("xllamacpp")
    keys = {"tokenizer.ggml.add_bos_token": adds, "tokenizer.chat_template": template}
    path = gguf_files.export(tiny_model("llama"), tmp_path / "m.gguf", extra=keys)
    session = start(str(path), ChatSettings(ctx=64, threads=1, tokens=1))
    made = session.say("x", silent)
    session.engine.close()
    assert made.prompt_tokens == 2 + (begun or adds)


def test_half_a_character_is_replaced(begin):
    assert begin(TEMPLATE + "{{ '\\ud800' }}").say(TALE[0], silent).text


def test_where_llama_cpp_is_missing_weights_are_decoded(model, quantkit, monkeypatch):
    monkeypatch.setattr(choose, "installed", lambda name: False)
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon\n"))
    done = quantkit("chat", model, "--raw", "--json", "-n", 2, "-q")
    assert "llama.cpp is not installed (pip install xllamacpp): weights are decoded" in done.err
    assert json.loads(done.out)["model"]["engine"].startswith("transformers")
    with pytest.raises(QuantkitError, match=r"llama\.cpp is not installed"):
        start(str(model), ChatSettings(engine="llama.cpp", raw=True))


def test_it_says_the_same_again(begin):
    texts = [[session.say(said, silent).text for said in SAID] for session in (begin(), begin())]
    assert texts[0] == texts[1]
