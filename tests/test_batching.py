"""Batching: what is counted, by hand; a small model served three ways on a clock that ticks once a step."""

import itertools
import json
import math
from dataclasses import replace

import far_device
import pytest
import torch
import transformers
from bench_runs import checked
from transformers.generation.continuous_batching import continuous_api

from quantkit.errors import QuantkitError
from quantkit.models.files.open import open_checkpoint
from quantkit.serving.bench import prompts as random_prompts
from quantkit.serving.bench.batching import continuous, measure, padded, show, trace
from quantkit.serving.bench.batching.trace import BatchStep, Replay, Served, TraceRequest, figures
from quantkit.serving.bench.settings import BatchingSettings
from quantkit.serving.engines import transformers as engine

# A is there first; B and C come together. On a clock that ticks once a step everything is known by hand.
REQUESTS = (TraceRequest(0.0, 3, 3), TraceRequest(0.5, 2, 2), TraceRequest(0.5, 4, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import families

    place = families.save_model(tmp_path_factory.mktemp("batching") / "llama", "llama", num_hidden_layers=2)
    families.save_tokenizer(place)
    return place


@pytest.fixture(scope="module")
def model(folder):
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return made.eval()


@pytest.fixture(scope="module")
def prompts(model):
    return drawn(REQUESTS, model, "0")


def drawn(requests, model, seed: str) -> list[list[int]]:
    return random_prompts.draw([request.prompt for request in requests], model.config.vocab_size, seed)


def times(replay: Replay) -> list[tuple[float, float]]:
    return [(served.first, served.done) for served in replay.requests]


def test_a_padded_batch_is_counted():
    """Prompts of 2 and 4 tokens, answers of 3 and 1, started at 10: the short prompt has 2 positions of
    padding, the short answer makes two decoding steps for nobody."""
    requests = [TraceRequest(9.0, 2, 3), TraceRequest(8.0, 4, 1)]
    batch = padded.account(requests, 10.0, [4.0, 1.0, 1.0], [[1, 2, 3], [4, 5, 6]])
    assert batch.requests == [Served(9.0, 14.0, 16.0, (1, 2, 3)), Served(8.0, 14.0, 16.0, (4,))]
    assert batch.steps == [
        BatchStep(4.0, prompt_slots=8, prompt_tokens=6, used=6, reserved=8),
        BatchStep(1.0, sequences=2, finished=1, used=3, reserved=10),
        BatchStep(1.0, sequences=2, finished=1, used=4, reserved=12),
    ]
    found = figures(batch)
    assert (found["padded"], found["idle"]) == (0.25, 0.5)
    assert (found["used"], found["reserved"]) == pytest.approx((31 / 6, 9.0))
    assert (found["seconds"], found["busy"]) == (8.0, 0.75)
    assert (found["tokens_per_second"], found["requests_per_second"]) == (0.5, 0.25)
    assert found["latency"] == pytest.approx({"p50": 7.5, "p90": 7.9, "p99": 7.99})
    assert found["first_token"] == pytest.approx({"p50": 5.5, "p90": 5.9, "p99": 5.99})


def test_static_batches_on_the_clock(model, prompts, ticking):
    """A and B start when B is there and end with A's third token; then C, alone."""
    replay = padded.serve(model, REQUESTS, prompts, 2, math.inf)
    assert times(replay) == [(1.5, 3.5), (1.5, 3.5), (4.5, 4.5)]
    assert [step.seconds for step in replay.steps] == [1.0] * 4
    assert figures(replay)["idle"] == 0.25  # the last token of two in the two steps of two sequences


def test_dynamic_batches_on_the_clock(model, prompts, ticking):
    """A waits a quarter of a second for nobody; B and C are together when it is done."""
    replay = padded.serve(model, REQUESTS, prompts, 2, 0.25)
    assert times(replay) == [(1.25, 3.25), (4.25, 5.25), (4.25, 5.25)]


def test_continuous_batches_on_the_clock(model, prompts, ticking):
    """B joins at A's second step, and C at once when both are done. Blocks hold 4 tokens: after the steps
    1, 2, 3 and 1 of them are held for 3, 4 + 2, 5 + 3 and 4 tokens."""
    before = model.config._attn_implementation
    replay = continuous.serve(model, REQUESTS, prompts, 2)
    assert times(replay) == [(1.0, 3.0), (2.0, 3.0), (4.0, 4.0)]
    assert [(step.used, step.reserved) for step in replay.steps] == [(3, 4), (6, 8), (8, 12), (4, 4)]
    assert [(step.prompt_tokens, step.sequences) for step in replay.steps] == [(3, 0), (2, 1), (0, 2), (4, 0)]
    found = figures(replay)
    assert (found["padded"], found["idle"], found["used"], found["reserved"]) == (0.0, 0.0, 5.25, 7.0)
    assert model.config._attn_implementation == before


def test_nothing_is_computed_while_nobody_is_there(model, prompts, ticking):
    late = [replace(REQUESTS[0]), TraceRequest(100.0, 2, 2)]
    replay = continuous.serve(model, late, prompts, 2)
    assert times(replay) == [(1.0, 3.0), (101.0, 102.0)] and len(replay.steps) == 5


def test_all_three_write_what_each_request_alone_gets(model):
    requests = [TraceRequest(index * 0.3, 3 + 5 * index % 11, 1 + 7 * index % 9) for index in range(7)]
    prompts = drawn(requests, model, "1")
    alone = [
        tuple(engine.continue_batch(model, [prompt], request.output)[0][0])
        for prompt, request in zip(prompts, requests, strict=True)
    ]
    replays = [padded.serve(model, requests, prompts, 3, wait) for wait in (math.inf, 0.1)]
    replays.append(continuous.serve(model, requests, prompts, 3))
    for replay in replays:
        assert [served.tokens for served in replay.requests] == alone


def test_the_loop_that_is_stepped_writes_what_generate_batch_writes(model):
    requests = [TraceRequest(0.0, length, 6) for length in (3, 9, 5, 7)]
    prompts = drawn(requests, model, "2")
    ours = continuous.serve(model, requests, prompts, 2)
    settings = transformers.ContinuousBatchingConfig(page_size=4, num_blocks=40, max_batch_tokens=64)
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=6)
    theirs = model.generate_batch(prompts, greedy, settings)
    assert [list(served.tokens) for served in ours.requests] == [
        answer.generated_tokens for answer in theirs.values()
    ]


def asked(policies: str = "static,dynamic,continuous", **more) -> BatchingSettings:
    return BatchingSettings(**{"policies": policies, "batch": 2, "repeats": 2, "dtype": "float32"} | more)


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    monkeypatch.setattr(trace, "sample", lambda *_: REQUESTS)
    monkeypatch.setattr(continuous, "PAGE", 4)


@pytest.fixture
def ticking(monkeypatch):
    """A second for each step, on every clock."""
    seconds = itertools.count()
    for module in (engine, continuous):
        monkeypatch.setattr(module, "device_time", lambda device: float(next(seconds)))


@pytest.fixture
def checkpoint(folder):
    return open_checkpoint(str(folder), None, True, False)


@pytest.fixture(scope="module")
def result(folder):
    checkpoint = open_checkpoint(str(folder), None, True, False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trace, "sample", lambda *_: REQUESTS)
        return measure.measure(checkpoint, asked(dtype="bfloat16"))


def test_a_result_has_every_strategy(result):
    assert [outcome["strategy"] for outcome in result["outcomes"]] == ["static", "dynamic", "continuous"]
    assert not any(outcome["refused"] for outcome in result["outcomes"])
    assert [len(outcome["tokens_per_second"]) for outcome in result["outcomes"]] == [2, 2, 2]
    assert result["outcomes"][0]["ratio"] == 1.0


def test_the_record_is_what_its_schema_says(result):
    record = checked(result, "batching/bench-batching-2.json")
    assert dict(record["trace"][1]) == {"arrival": 0.5, "prompt": 2, "output": 2}
    assert [len(outcome["requests"]) for outcome in record["outcomes"]] == [3, 3, 3]


def test_the_plot_shows_latencies(result):
    (figure,) = show.report(result).figures
    assert [series.label for series in figure.series] == ["static", "dynamic", "continuous"]
    latencies = sorted(s["done"] - s["arrival"] for s in result["outcomes"][2]["requests"])
    assert [point.x for point in figure.series[2].points] == latencies
    assert figure.series[2].points[-1].y == 100


def refusing(*_):
    raise ValueError("Invalid layer type: mamba")


def test_a_strategy_that_cannot_serve_is_an_outcome(checkpoint, monkeypatch):
    monkeypatch.setitem(measure.SERVE, "continuous", refusing)
    made = measure.measure(checkpoint, asked("static,continuous"))
    static, other = made["outcomes"]
    assert other["refused"] == "Invalid layer type: mamba" and static["figures"] is not None
    json.dumps(made, allow_nan=False)


def test_another_loop_in_transformers_is_an_outcome(checkpoint, monkeypatch):
    monkeypatch.delattr(continuous_api.ContinuousMixin, "init_continuous_batching")
    made = measure.measure(checkpoint, asked("static,continuous"))
    assert "init_continuous_batching" in made["outcomes"][1]["refused"]


def test_a_strategy_that_fails_midway_is_an_outcome(checkpoint, monkeypatch):
    """Memory that runs out after the warm-up."""
    serve, calls = continuous.serve, []

    def once(*arguments):
        calls.append(arguments)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("out of memory\nTried to allocate 20.00 GiB")
        return serve(*arguments)

    monkeypatch.setitem(measure.SERVE, "continuous", once)
    made = measure.measure(checkpoint, asked("continuous,static"))
    assert made["outcomes"][0]["refused"] == "out of memory" and made["outcomes"][1]["ratio"] == 1.0


@pytest.mark.parametrize(
    "values", [{"policies": "static,magic"}, {"policies": ","}, {"batch": 0}, {"repeats": 0}, {"rate": 0.0}]
)
def test_settings_that_make_no_sense_are_refused(values):
    with pytest.raises(QuantkitError) as error:
        asked(**values).check()
    assert error.value.exit_code == 2


def test_it_runs_on_an_accelerator(checkpoint, monkeypatch):
    """On the double without streams: transformers' own order of streams is not ours to prove."""
    monkeypatch.setattr(torch.far, "__name__", "torch.far", raising=False)
    torch.get_device_module.cache_clear()  # torch remembers that there was none
    with far_device.present() as device:
        device.streams = False
        made = measure.measure(checkpoint, asked(repeats=1, device="far"))
        assert device.launches
    torch.get_device_module.cache_clear()
    assert [outcome["refused"] for outcome in made["outcomes"]] == [""] * 3
