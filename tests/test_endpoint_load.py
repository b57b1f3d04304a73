"""An endpoint under load, on a stand-in that counts; figures on times that are given."""

import json
import threading

import pytest
from rich.console import Console
from stand_in_openai import StandIn

from quantkit.errors import USAGE, QuantkitError
from quantkit.serving.bench.settings import Server
from quantkit.serving.endpoint import load, show
from quantkit.serving.endpoint.figures import Timed, percentiles, summarize
from quantkit.serving.endpoint.load import measure

SMALL = {"prompt_words": 17, "tokens": 4}


def test_percentiles_of_one_value_and_of_none():
    assert percentiles([2.0]) == {"p50": 2.0, "p90": 2.0, "p99": 2.0, "mean": 2.0}
    assert percentiles([]) is None


def test_figures_of_given_times():
    """Two answers beside each other, one of them in chunks of two tokens, and one failure."""
    found = summarize(
        [
            Timed(0.0, 4.0, (1.0, 2.0, 3.0, 4.0), prompt_tokens=10, output_tokens=4),
            Timed(1.0, 6.0, (3.0, 5.0), prompt_tokens=20, output_tokens=4),
            Timed(2.0, 2.5, error="HTTP 503", message="busy"),
        ]
    )
    assert (found["requests"], found["completed"]) == (3, 2)
    assert found["errors"] == {"HTTP 503": 1} and found["messages"] == {"HTTP 503": "busy"}
    assert found["seconds"] == 6.0 and found["prompt_tokens"] == 15
    assert found["output_tokens"] == 8 and found["tokens_per_chunk"] == pytest.approx(8 / 6)
    assert found["output_tokens_per_second"] == pytest.approx(8 / 6)
    assert found["output_tokens_per_second_per_user"] == pytest.approx((4 / 4 + 4 / 5) / 2)
    assert found["requests_per_second"] == pytest.approx(2 / 6)
    assert found["ttft_seconds"]["mean"] == 1.5 and found["ttft_seconds"]["p50"] == 1.5
    assert found["itl_seconds"] == percentiles([1.0, 1.0, 1.0, 2.0])
    assert found["latency_seconds"]["mean"] == 4.5


def test_chunks_are_counted_where_the_server_does_not():
    assert summarize([Timed(0.0, 1.0, (0.5, 0.7, 1.0))])["output_tokens"] == 3


def test_users_ask_together_and_again():
    """Nobody is answered before all of a level have asked: their number is what was said."""
    users = 3
    with StandIn(gate=threading.Barrier(users)) as server:
        result = measure(server.url, Server(concurrency=str(users), requests=2 * users, **SMALL))
        prompts = server.prompts()
    (level,) = result["levels"]
    assert (level["users"], level["requests"], level["completed"], level["errors"]) == (users, 6, 6, {})
    assert level["output_tokens"] == 6 * 4 and level["tokens_per_chunk"] == 1.0
    assert level["prompt_tokens"] == 20
    assert len(set(prompts)) == 6 and {len(prompt.split()) for prompt in prompts} == {17}


def test_the_same_seed_asks_the_same():
    asked = []
    for seed in (1, 1, 2):
        with StandIn() as server:
            measure(server.url, Server(concurrency="2", requests=4, seed=seed, **SMALL))
            asked.append(sorted(server.prompts()))
    assert asked[0] == asked[1] != asked[2]


def test_errors_are_counted():
    with StandIn(failing=(2, "503")) as server:
        result = measure(server.url, Server(concurrency="1,2", requests=8, **SMALL))
    for level in result["levels"]:
        assert level["errors"] == {"HTTP 503": 4} and level["completed"] == 4
        assert level["output_tokens"] == 16


def test_a_server_that_answers_nobody_is_left_alone():
    said = []
    listen = load.Progress()
    listen.warn = said.append
    with StandIn(failing=(1, "break")) as server:
        result = measure(server.url, Server(concurrency="1,2", requests=5, **SMALL), listen)
    assert [level["errors"] for level in result["levels"]] == [{"stream": 5}]
    assert said == ["no request was answered with 1 user: 5 × stream (the answer broke off); stopping here"]


def test_a_mistake_of_ours_is_not_counted_but_raised(monkeypatch):
    def wrong(*arguments):
        raise ZeroDivisionError("ours")

    with StandIn() as server:
        monkeypatch.setattr(load, "words", wrong)
        with pytest.raises(ZeroDivisionError):
            measure(server.url, Server(concurrency="2", requests=4, **SMALL))


def test_another_machine_is_not_asked():
    with pytest.raises(QuantkitError) as refused:
        measure("http://192.0.2.1:8000", Server())
    assert refused.value.exit_code == USAGE and "--allow-remote" in refused.value.hint


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": "0"},
        {"concurrency": "5000"},
        {"concurrency": ""},
        {"requests": 0},
        {"tokens": 0},
    ],
)
def test_numbers_that_make_no_sense(wrong):
    with pytest.raises(QuantkitError) as refused:
        measure("http://127.0.0.1:1", Server(**wrong))
    assert refused.value.exit_code == USAGE


def test_the_record_and_the_table():
    settings = Server(concurrency="1,2", requests=2, api_key="hush", **SMALL)
    with StandIn(refuses=("ignore_eos",), counts=False, key="hush", failing=(5, "503")) as server:
        result = measure(server.url, settings)
    record = json.loads(json.dumps(result))
    assert record["schema"] == "quantkit.load/2" and record["model"] == "stand-in"
    assert record["settings"]["output_tokens"] == 4 and not record["ignore_eos"]
    assert "hush" not in json.dumps(record) + repr(settings)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    show.report(result).show(console)
    text = console.export_text()
    assert "chunks are counted instead" in text and "ignore_eos" in text
    rows = [line.split() for line in text.splitlines() if line[:2].strip().isdigit()]
    assert [row[:2] for row in rows] == [["1", "2"], ["2", "1"]]
    assert "errors with 2 users: 1 × HTTP 503" in text
    assert max(len(line.rstrip()) for line in text.splitlines() if "/" in line and "tokens" not in line) <= 80
