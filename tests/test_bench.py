"""`quantkit bench`: what is counted, what is derived, what is told; and what goes wrong."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import bench_runs
import far_device
import gguf_files
import jsonschema
import numpy as np
import psutil
import pytest
import records
import transformers
from bench_runs import measured, subject

from quantkit.cli import bench_modes, commands
from quantkit.errors import QuantkitError
from quantkit.evaluation.comparison.files import Outputs
from quantkit.serving import bench
from quantkit.serving.bench import (
    columns,
    figures,
    job,
    machine,
    measure,
    memory,
    page,
    quality,
    roofline,
    run,
    runners,
    statistics,
    subjects,
    table,
    worker,
)
from quantkit.serving.bench.panels import Panels
from quantkit.serving.bench.record import record
from quantkit.serving.bench.runners import llama_bench, llamacpp, vllm
from quantkit.serving.bench.settings import Point, Settings, parse_list, usual_threads

SMALL = Settings(batches=(1, 3), prompts=(5,), tokens=4, repeats=2, warmup=1, rounds=1, dtype="float32")
QUICK = ["--tokens", "3", "--prompt", "4", "--repeats", "1", "--rounds", "1", "--warmup", "0"]


def told(folder: Path, settings: Settings = SMALL, engine: str = "transformers", **asked) -> list[dict]:
    """Events of a worker that runs in this process."""
    heard: list[dict] = []
    made = job.Job(subjects.open_subject(str(folder)), engine, settings, settings.points, **asked)
    worker.measure(job.Job.load(made.dump()), heard.append)
    return heard


# ---- numbers


def test_a_summary_of_runs():
    found = statistics.summary([4.0, 1.0, 2.0, 10.0])
    assert found == {
        "count": 4, "median": 3.0, "p90": pytest.approx(8.2), "min": 1.0, "max": 10.0, "mad": 0.5,
    }  # fmt: skip
    assert statistics.summary([7.0])["p90"] == 7.0


def test_a_quantile_is_numpys():
    values = np.random.default_rng(0).normal(size=23).tolist()
    assert [statistics.quantile(values, q) for q in (0, 0.37, 0.9, 1)] == pytest.approx(
        np.quantile(values, (0, 0.37, 0.9, 1)).tolist()
    )


@pytest.mark.parametrize("shape", ["max", "sum"])
def test_a_fit_recovers_the_batch_from_which_sequences_cost_time(shape):
    truth = roofline.Fit(shape, 0.012, 0.001, 0.0)
    times = [(batch, truth.seconds(batch)) for batch in (1, 2, 4, 8, 16, 32, 64)]
    found = roofline.fit(times)
    assert (found.shape, found.floor, found.slope) == (shape, pytest.approx(0.012), pytest.approx(0.001))
    assert found.optimal_batch == pytest.approx(12.0) and found.error < 1e-9
    assert roofline.where(found, times) == "within"
    assert [roofline.where(found, times[:2]), roofline.where(found, times[4:])] == ["beyond", "below"]


def test_noise_of_a_tenth_moves_the_batch_by_little():
    noise = np.random.default_rng(1).normal(1, 0.1, 7)
    times = [(2**k, (0.012 + 0.001 * 2**k) * noise[k]) for k in range(7)]
    assert roofline.fit(times).optimal_batch == pytest.approx(12, rel=0.35)


def test_no_fit_without_three_batches_or_a_cost():
    assert roofline.fit([(1, 0.1), (8, 0.2)]) is None
    assert roofline.fit([(1, 0.4), (2, 0.2), (4, 0.1)]).slope > 0  # falling times: the last batch is a cost
    assert roofline.fit([]) is None


def test_the_predicted_roof_is_plans():
    roof = roofline.Roof(weight_bytes=2000, cache_bytes=100, active=1000, bandwidth=1e6, flops=4e6)
    assert roof.optimal_batch == 4.0  # 4e6 · 2 bytes / (2 · 1e6)
    assert roof.seconds(1) == pytest.approx(2100 / 1e6)
    assert roof.seconds(40) == pytest.approx(2 * 1000 * 40 / 4e6)


# ---- what is run


@pytest.fixture
def forwards(monkeypatch):
    """Shapes of the ids of every forward of a Llama but those that look at it while it is loaded."""
    shapes, forward = [], transformers.LlamaModel.forward

    def counted(self, input_ids=None, **rest):
        if rest["use_cache"]:
            shapes.append(tuple(input_ids.shape))
        return forward(self, input_ids=input_ids, **rest)

    monkeypatch.setattr(transformers.LlamaModel, "forward", counted)
    return shapes


def test_prefilled_and_decoded_tokens_are_exact(tiny_model, forwards):
    """Though the checkpoint says that every token ends a text."""
    folder = tiny_model("llama", num_hidden_layers=2)
    ends = {"eos_token_id": list(range(512)), "do_sample": True, "max_new_tokens": 2}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    events = told(folder)
    one = [[(batch, 5), *[(batch, 1)] * 3] for batch in (1, 3)]
    assert forwards == one[0] * 3 + one[1] * 3
    runs = [event for event in events if event["event"] == "run"]
    assert [(run["batch"], run["warmup"]) for run in runs] == [
        (batch, warm) for batch in (1, 3) for warm in (True, False, False)
    ]
    for found in runs:
        batch = found["batch"]
        assert (found["prefill_tokens"], found["decode_tokens"]) == (5 * batch, 3 * batch)
        assert len(found["step_seconds"]) == 3
        assert sum(found["step_seconds"]) == pytest.approx(found["decode_seconds"])
        # keys and values of 2 heads of 16, 2 layers, float32; the last token is in no cache
        assert found["kv_bytes"] == 2 * 2 * 2 * 16 * 4 * batch * (5 + 3)
    (loaded,) = (event for event in events if event["event"] == "loaded")
    assert (loaded["kernels"], loaded["packed"], loaded["attention"]) == ("torch Linear", False, "sdpa")
    stored = subjects.open_subject(str(folder)).weight_bytes
    assert 0 <= loaded["weight_bytes"] - stored < 1000  # rotary frequencies are not stored
    assert events[-1] == {"event": "done"}


def test_prompts_are_the_seeds_and_of_the_middle_of_the_vocabulary():
    known = subject("a")
    first = known.prompts(Point(2, 50), 0)
    assert first == known.prompts(Point(2, 50), 0) != known.prompts(Point(2, 50), 1)
    assert [len(ids) for ids in first] == [50, 50] and first[0] != first[1]
    assert all(128 <= token < 256 for ids in first for token in ids)


def test_on_an_accelerator(tiny_model):
    folder = tiny_model("llama", num_hidden_layers=1)
    with far_device.present():
        events = told(folder, Settings(**{**vars(SMALL), "device": "far"}), rates=True)
        assert far_device.DEVICE.launches
    runs = [event for event in events if event["event"] == "run"]
    assert [found["decode_tokens"] for found in runs] == [3] * 3 + [9] * 3
    (rates,) = (event for event in events if event["event"] == "rates")
    assert rates["bandwidth"] > 0 and rates["flops"] > 0


def test_llama_cpp_is_counted_from_what_arrives(tmp_path, tiny_model):
    pytest.importorskip("xllamacpp")
    path = gguf_files.export(tiny_model("llama"), tmp_path / "tiny.gguf")
    row = run.rows([str(path)], "auto", SMALL)[0]
    heard = list(measure.events(job.Job(row.subject, row.engine, SMALL, SMALL.points)))
    runs = [event for event in heard if event["event"] == "run"]
    assert [found["prefill_tokens"] for found in runs] == [5] * 3 + [15] * 3
    assert [found["decode_tokens"] for found in runs if found["batch"] == 1] == [3] * 3
    assert all(0 < found["decode_tokens"] <= 9 for found in runs if found["batch"] == 3)
    # 256 tokens are laid out for each sequence; 2 bytes, 3 layers, 2 heads of 16
    assert [found["kv_bytes"] for found in runs] == [2 * 2 * 3 * 32 * 256 * n for n in (1, 1, 1, 3, 3, 3)]
    assert heard[0]["kernels"] == "llama.cpp ggml" and heard[-1] == {"event": "done"}


def test_tokens_that_came_while_others_were_prefilled_are_not_decoded():
    arrivals = [[(1.0, 1), (2.0, 2), (4.0, 4)], [(2.5, 1), (3.0, 2), (3.5, 4)]]
    found = llamacpp.timing(0.5, arrivals, Point(2, 8), 4, None)
    assert (found.prefill_seconds, found.prefill_tokens) == (2.0, 16)
    assert (found.decode_seconds, found.decode_tokens) == (1.5, 8 - 2 - 1)
    assert found.step_seconds == [1.0, 1.0, 1.0]  # two tokens at once took two seconds


def test_vllms_own_clock():
    def output(scheduled, first, last):
        times = SimpleNamespace(scheduled_ts=scheduled, first_token_ts=first, last_token_ts=last)
        return SimpleNamespace(
            prompt_token_ids=[0] * 5, outputs=[SimpleNamespace(token_ids=[0] * 4)], metrics=times
        )

    found = vllm.timing([output(1.0, 2.0, 5.0), output(1.5, 3.0, 6.0)])
    assert (found.prefill_tokens, found.prefill_seconds) == (10, 2.0)
    assert (found.decode_tokens, found.decode_seconds, found.step_seconds) == (6, 3.0, ())


# What llama-bench prints, of its keys those that matter.
LLAMA_BENCH = """#!{python}
import json, sys
told = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "broken" in told["-m"]:
    sys.exit("error: failed to load model")
prompt, new = int(told["-p"]), int(told["-n"])
ns = 1_000_000 * (prompt * 2 + new * (10 + int(told.get("-d", 0))))
print(json.dumps([{{"n_prompt": prompt, "n_gen": new, "avg_ns": ns, "samples_ns": [ns]}}]))
"""


def test_llama_bench_on_the_path(tmp_path, tiny_model, monkeypatch):
    program = tmp_path / "bin" / "llama-bench"
    program.parent.mkdir()
    program.write_text(LLAMA_BENCH.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    path = gguf_files.export(tiny_model("llama"), tmp_path / "tiny.gguf")
    known = subjects.open_subject(str(path))
    asked = job.Job(known, "llama-bench", SMALL, SMALL.points)
    found = llama_bench.start(asked).run([[1] * 5], 4)
    assert (found.prefill_tokens, found.prefill_seconds) == (5, 0.01)
    assert (found.decode_tokens, found.decode_seconds) == (3, 0.045)  # 3 tokens of 10 + 5 ms
    with pytest.raises(QuantkitError, match="one sequence"):
        llama_bench.start(asked).run([[1] * 5] * 2, 4)
    path.rename(tmp_path / "broken.gguf")
    broken = subjects.open_subject(str(tmp_path / "broken.gguf"))
    with pytest.raises(QuantkitError, match="failed to load model"):
        llama_bench.start(job.Job(broken, "llama-bench", SMALL, SMALL.points)).run([[1] * 5], 4)


def test_the_peak_of_a_process_is_above_what_it_had():
    meter = memory.Meter()
    held = bytearray(64 << 20)
    assert meter.peak() >= len(held)
    del held
    meter.reset()
    if memory.RESET.exists():
        assert meter.peak() < 32 << 20


def test_a_device_of_the_data_sheets_is_not_measured(monkeypatch):
    far = SimpleNamespace(type="cuda")
    monkeypatch.setattr(machine.torch, "get_device_module", lambda device: SimpleNamespace(
        get_device_name=lambda device: "NVIDIA A100-SXM4-40GB"
    ))  # fmt: skip
    monkeypatch.setattr(machine.devices, "find", lambda name: machine.devices.DEVICES["a100-40g"])
    assert machine.rates(far, None, 0) == {
        "bandwidth": 1555e9, "flops": 312e12, "source": "data sheet of a100-40g",
    }  # fmt: skip


# ---- what cannot run


def test_points_that_cannot_run_are_refused_and_the_others_run(tiny_model):
    folder = tiny_model("llama", num_hidden_layers=1)  # made for 256 tokens
    asked = Settings(prompts=(5, 300), tokens=4, repeats=1, warmup=0, rounds=1, dtype="float32")
    events = told(folder, asked)
    (refused,) = (event for event in events if event["event"] == "refused")
    assert refused["message"] == "300 prompt + 4 new tokens, the model was made for 256"
    assert [event["prompt"] for event in events if event["event"] == "run"] == [5]


def test_nothing_is_loaded_that_does_not_fit(tiny_model, monkeypatch):
    folder = tiny_model("llama", num_hidden_layers=1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=300_000))
    events = told(folder)
    assert [event["event"] for event in events] == ["refused", "refused", "done"]
    assert "0.30 MB of memory are free" in events[0]["message"]
    assert "of weights and" in events[0]["message"]


def test_memory_that_runs_out_in_a_run_is_that_points(tiny_model, monkeypatch):
    folder = tiny_model("llama", num_hidden_layers=1)
    ran = runners.find("transformers").Generation.run

    def failing(self, prompts, tokens):
        if len(prompts) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return ran(self, prompts, tokens)

    monkeypatch.setattr(runners.find("transformers").Generation, "run", failing)
    events = told(folder)
    (refused,) = (event for event in events if event["event"] == "refused")
    assert refused["batch"] == 3 and "allocate" in refused["message"]
    assert sum(event["event"] == "run" for event in events) == 3


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by the system"),
        ("import sys; sys.exit('libfoo.so is missing')", "ended with exit code 1: libfoo.so is missing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV"),
        ('print(\'{"event": "failed", "message": "no", "hint": "a fix"}\')', "no (a fix)"),
    ],
)
def test_a_worker_that_dies_is_a_row_that_says_why(tmp_path, monkeypatch, body, reason):
    (tmp_path / "dying.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(measure, "MODULE", "dying")
    well = measured("well", SMALL, lambda batch, number: 0.01)
    dead = measure.Measured(subject("dead"), "transformers")
    measure.measure([dead], SMALL)
    assert reason in dead.error
    made = checked(record([well, dead], SMALL))
    assert [point["error"] for point in made["models"][1]["points"]] == [dead.error] * 2
    assert made["models"][0]["points"][0]["decode"]["tokens_per_second"]["median"] == pytest.approx(100)
    assert columns.failures(made) == [f"dead: {dead.error}"]


def test_an_engine_that_cannot_run_a_checkpoint_is_a_row(tiny_model):
    folder = tiny_model("llama", num_hidden_layers=1)
    rows = run.rows([str(folder)], "transformers,llama.cpp", SMALL)
    assert [row.engine for row in rows] == ["transformers", "llama.cpp"]
    assert rows[0].error is None and "llama.cpp runs GGUF files" in rows[1].error
    measure.measure(rows[1:], SMALL)
    with pytest.raises(QuantkitError, match="nothing ran: .*GGUF") as raised:
        run.refuse_empty(record(rows[1:], SMALL))
    checked(raised.value.record())


def test_gguf_runs_decoded_without_llama_cpp_and_says_so(tmp_path, tiny_model, monkeypatch):
    path = gguf_files.export(tiny_model("llama"), tmp_path / "tiny.gguf")
    known = subjects.open_subject(str(path))
    monkeypatch.setattr(runners.util, "find_spec", lambda name: None)
    monkeypatch.setattr(runners.shutil, "which", lambda name: None)
    engine, note = runners.choose("auto", known)
    assert engine == "transformers" and "llama.cpp is not installed" in note
    for name in ("llama.cpp", "llama-bench", "vllm"):
        with pytest.raises(QuantkitError, match="not installed"):
            runners.choose(name, known)
    monkeypatch.setattr(runners.shutil, "which", lambda name: "/bin/llama-bench")
    assert runners.choose("llama.cpp", known)[0] == "llama-bench"


# ---- what is told


def checked(made: dict) -> dict:
    """A record, which must fit its schema as it would be printed."""
    schema = json.loads(Path(bench.__file__).with_name("bench-1.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(json.dumps(made, allow_nan=False)), schema)
    return made


SWEEP = Settings(batches=(1, 2, 4, 8, 16), prompts=(8, 16), tokens=5, repeats=2, rounds=2)


@pytest.fixture
def swept() -> dict:
    """Two models; the second twice as fast at first, then half as slow, and noisy."""
    return checked(
        record(
            [
                measured("org/base", SWEEP, lambda batch, number: 0.004 + 0.001 * batch),
                measured(
                    "org/base-nf4", SWEEP, lambda batch, number: (0.002 + 0.0005 * batch) * (1 + number / 2),
                    kernels="bitsandbytes Linear4bit", packed=True,
                ),
            ],
            SWEEP,
        )
    )  # fmt: skip


def test_a_record_has_the_figures_of_its_runs(swept):
    base, other = swept["models"]
    point = base["points"][1]
    assert (point["batch"], point["prompt"]) == (2, 8)
    assert point["prefill"]["tokens"] == 16
    assert point["prefill"]["tokens_per_second"]["median"] == pytest.approx(16 / 0.08)
    assert point["decode"]["tokens_per_second"]["median"] == pytest.approx(2 / 0.006)
    assert point["latency"]["count"] == 2 * 2 * 4 and point["latency"]["p90"] == pytest.approx(0.006)
    assert point["memory"] == {"weight_bytes": 4000, "kv_bytes": 200, "peak_bytes": 5002}
    assert point["ratio"]["decode"] == {"value": 1.0, "min": 1.0, "max": 1.0}
    ratio = other["points"][1]["ratio"]["decode"]
    assert (ratio["min"], ratio["max"]) == (pytest.approx(2 / 1.5), pytest.approx(2.0))
    assert ratio["value"] == pytest.approx((2 + 2 / 1.5) / 2)
    assert base["load"]["seconds"] == 0.5
    assert [found["measured"]["optimal_batch"] for found in base["roofline"]] == pytest.approx([4.0, 4.0])
    assert base["roofline"][0]["predicted"]["optimal_batch"] == 8.0  # 4e6 · 4 bytes / (2 · 1e6)


def test_the_table(swept, capsys):
    table.show(swept)
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert lines[1][:6] == ["model", "engine", "size", "bits", "decode/s", "ratio"]
    assert ["2", "×", "8", "tokens"] in lines
    shown = next(line for line in lines if line[:2] == ["base-nf4", "bitsandbytes"])
    assert shown[2:8] == ["0.00", "MB", "16.00", "333", "1.67×", "20"]
    assert "b* of base, 8 tokens: predicted 8.00 (0.0 GB/s, 0 GFLOPS measured), measured 4.00" in out
    assert "noisy: runs of base-nf4 differ by ± 20 %" in out and "runs of base differ" not in out
    assert "2 rounds of 2 runs after 1 to warm up" in out and "bitsandbytes Linear4bit, packed" in out


def test_every_figure_can_be_drawn(swept, tmp_path):
    pytest.importorskip("matplotlib")
    from quantkit.evaluation.comparison import drawing

    found = figures.figures(swept)
    assert [figure.key for figure in found] == ["batch-8", "batch-16", "size", "prompt"]
    bare = [series for series in found[0].series if series.bare]
    assert [series.points[0].y for series in bare] == pytest.approx([1 / 0.0041] * 2)  # 4000 + 100 bytes
    assert bare[0].points[-1].y == pytest.approx(2000)  # 4e6 / (2 · 1000)
    drawn = drawing.document(found[0])
    assert drawn.count("<title>") == 2 * 5  # each point that was measured, none of the dashed curves
    assert "stroke-dasharray" in drawn


def test_the_page():
    pytest.importorskip("matplotlib")
    rows = [measured(name, SMALL, lambda batch, number: 0.1) for name in ("a/one", "b/<two>")]
    text = page.page(record(rows, SMALL))
    assert "Batch 3, 5 prompt tokens" in text and text.count('<svg class="plot"') == 4  # each for phones, too
    assert "<script" not in text and "&lt;two&gt;" in text and "<two>" not in text


def test_one_model_has_both_knees_in_its_plot():
    row = measured("base", SWEEP, lambda batch, number: 0.004 + 0.001 * batch)
    found = figures.figures(record([row], SWEEP))
    assert [line.label for line in found[0].lines] == ["measured b* 4.00", "predicted b* 8.00"]


def test_a_model_in_two_engines_is_two_names():
    rows = [
        measured("m.gguf", SMALL, lambda batch, number: 0.1, engine=name) for name in ("llama.cpp", "vllm")
    ]
    made = checked(record(rows, SMALL))
    assert [model["label"] for model in made["models"]] == ["m.gguf (llama.cpp)", "m.gguf (vllm)"]


# ---- quality


def test_quality_is_found_by_source_or_name(tmp_path):
    evaluated = records.record(
        records.model("org/base", 2000),
        records.model("./out/base-nf4", 2000, 0.02),
        records.model("c", 7, 0.3),
    )
    path = tmp_path / "result.json"
    path.write_text(json.dumps(evaluated))
    told = quality.read([path])
    names = ("org/base", "/tmp/base-nf4/", "c", "other")
    rows = [measured(name, SMALL, lambda batch, number: 0.1) for name in names]
    made = checked(record(rows, SMALL, told))
    assert [model["quality"] and model["quality"]["kld"] for model in made["models"]] == [
        0.0,
        0.02,
        None,
        None,
    ]
    assert made["models"][1]["quality"]["perplexity"] == evaluated["models"][1]["metrics"]["ppl"]["value"]
    notes = [model["quality_note"] for model in made["models"]]
    assert notes[2] == "c is another model in --quality: 7 bytes there, 2,000 here"
    assert notes[3] == "other is not among the models of --quality"
    (figure,) = [figure for figure in figures.figures(made) if figure.key == "quality"]
    assert [(series.label, series.points[0].y) for series in figure.series] == [("base-nf4", 0.02)]
    assert quality.read([]) is None


# ---- the command


def test_the_whole_of_it(quantkit, tiny_model, tmp_path):
    """One that runs and one that does not: a record and plots."""
    folder = tiny_model("llama", num_hidden_layers=1)
    plot = tmp_path / "plot.svg"
    asked = [
        *QUICK,
        "--engine",
        "transformers,llama.cpp",
        "--batch",
        "1,2,3",
        "--threads",
        "1",
        "--plot",
        plot,
    ]
    done = quantkit("bench", folder, *asked, "--json", "-q")
    assert done.code == 0, done.err
    made = checked(json.loads(done.out))
    well, dead = made["models"]
    assert [point["decode"]["tokens"] for point in well["points"]] == [2, 4, 6]
    assert (
        well["engine"]["kernels"] == "torch Linear"
        and well["roofline"][0]["predicted"]["source"] == "measured"
    )
    assert "llama.cpp runs GGUF files" in dead["error"] and f"warning: {folder}: llama.cpp" in done.err
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "1,x"], "--batch '1,x' is no list of numbers"),
        (["--prompt", ""], "--prompt '' is no list"),
        (["--batch", "0"], "--batch 0 makes no sense"),
        (["--tokens", "1"], "--tokens 1 makes no sense"),
        (["--repeats", "0"], "--repeats 0 makes no sense"),
        (["--threads", "0"], "--threads 0 makes no sense"),
        (["--engine", "lama.cpp"], "no engine 'lama.cpp'"),
        (["--plot", "plot.pdf"], "plots are .svg or .png"),
        (["--concurrency", "4"], "--concurrency is for --url"),
        (["--attn", "sdpa", "--quality", "result.json"], "--quality is not for --attn"),
        (["--attn", "sdpa", "--url", "http://127.0.0.1:1"], "exclude each other"),
        (["--url", "http://127.0.0.1:1", "--html", "page.html"], "--html is not for --url"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(refuse, demo_model, arguments, said):
    error, hint = refuse(2, "bench", demo_model, *arguments)
    assert said in error
    if "lama" in said:
        assert "did you mean llama.cpp?" in hint


def test_what_is_not_there_is_refused(refuse, quantkit, demo_model):
    assert "no such folder" in refuse(3, "bench", "./nothing")[0]
    assert "cannot be read" in refuse(3, "bench", demo_model, "--quality", "nothing.json")[0]
    assert refuse(2, "bench")[0] == "give a model"


def test_lists_and_threads(monkeypatch):
    assert parse_list("--batch", " 8,1, 2,1") == (1, 2, 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert usual_threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert 1 <= usual_threads() <= os.cpu_count()
    assert bench_runs.FACTS["how"] == memory.Meter().how


def test_what_prints_and_draws_itself_becomes_a_page_and_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    panels = Panels(
        "Attention of <it>",
        lambda canvas: canvas.add_subplot().plot([1, 2], [3, 4]),
        lambda console: (console.print("one   x"), console.print("  <two>", markup=False)),
    )
    for suffix in (".svg", ".png"):
        panels.write(Outputs(html=tmp_path / "page.html", plot=tmp_path / f"plot{suffix}"))
    text = (tmp_path / "page.html").read_text()
    assert "one   x<br>  &lt;two&gt;<br></pre>" in text and '<svg class="plot"' in text
    assert "prefers-color-scheme" in (tmp_path / "plot.svg").read_text()
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_every_flag_that_a_question_heeds_exists():
    known = {parameter.name for parameter in commands.build("bench").params}
    assert bench_modes.HEEDED.keys() <= known
