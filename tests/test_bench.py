"""`quantkit bench`: what is run and counted, what cannot run, and the command (see test_bench_record.py)."""

import json
import logging
import os
import pickle
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import accelerator
import bench_runs
import gguf_files
import psutil
import pytest
import torch
import transformers
from bench_runs import SMALL, checked, measured, subject

from quantkit.errors import QuantkitError
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine import processor
from quantkit.serving.bench import measure, memory, prompts, runners, show, worker
from quantkit.serving.bench.record import record
from quantkit.serving.bench.settings import BenchSettings, Workload
from quantkit.serving.engines import choose
from quantkit.serving.engines import transformers as engine

QUICK = ["--tokens", "3", "--prompt-tokens", "4", "--repeats", "1", "--rounds", "1", "--warmup", "0"]


def told(folder: Path, settings: BenchSettings = SMALL, engine: str = "transformers") -> list[dict]:
    """Events of a worker that runs in this process."""
    made = (measure.open_subject(str(folder)), engine, settings, settings.workloads)
    return list(worker.measure(*pickle.loads(pickle.dumps(made))))


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
    assert [run["batch"] for run in runs] == [1, 1, 3, 3]
    for found in runs:
        batch = found["batch"]
        assert found["decode_tokens"] == 3 * batch
        assert len(found["step_seconds"]) == 3
        assert sum(found["step_seconds"]) == pytest.approx(found["decode_seconds"])
        # keys and values of 2 heads of 16, 2 layers, float32; the last token is in no cache
        assert found["kv_bytes"] == 2 * 2 * 2 * 16 * 4 * batch * (5 + 3)
    (loaded,) = (event for event in events if event["event"] == "loaded")
    assert (loaded["kernels"], loaded["packed"], loaded["attention"]) == ("torch Linear", False, "sdpa")
    stored = measure.open_subject(str(folder)).size["weight_bytes"]
    assert 0 <= loaded["weight_bytes"] - stored < 1000  # rotary frequencies are not stored


def test_kernels_are_those_that_ran(make, tiny_model, tmp_path):
    pytest.importorskip("bitsandbytes")
    make("nf4", tiny_model("llama", num_hidden_layers=1), "-o", tmp_path / "nf4")
    quick = replace(SMALL, batch="1", repeats=1, warmup=0)
    loaded = [told(tmp_path / "nf4", replace(quick, decoded=asked))[0] for asked in (False, True)]
    assert [(facts["kernels"], facts["packed"], facts["note"]) for facts in loaded] == [
        ("bitsandbytes Linear4bit", True, ""),
        ("torch Linear", False, "as requested"),
    ]
    assert loaded[0]["weight_bytes"] < loaded[1]["weight_bytes"]


def test_a_client_that_fails_at_first_use_is_not_used(make, tiny_model, tmp_path, monkeypatch):
    layers = pytest.importorskip("bitsandbytes.nn")
    make("nf4", tiny_model("llama", num_hidden_layers=1), "-o", tmp_path / "nf4")

    def failing(self, x):
        raise RuntimeError("no kernel for this device\nand more")

    monkeypatch.setattr(layers.Linear4bit, "forward", failing)
    checkpoint = open_checkpoint(str(tmp_path / "nf4"))
    _, found = engine.load(checkpoint, SMALL, 8)
    assert (found.kernels, found.packed) == ("torch Linear", False)
    assert found.note == "transformers does not load it packed: no kernel for this device"


def test_packages_that_are_missing_are_named_as_inspect_names_them(make, tiny_model, tmp_path, monkeypatch):
    make("nf4", tiny_model("llama", num_hidden_layers=1), "-o", tmp_path / "nf4")
    checkpoint = open_checkpoint(str(tmp_path / "nf4"))
    monkeypatch.setattr(engine, "installed", lambda package: package == "bitsandbytes")
    _, found = engine.load(checkpoint, SMALL, 8)
    assert found.note == "transformers does not load it packed: it needs accelerate (pip install accelerate)"
    assert engine.client_of(checkpoint)["note"] == "with accelerate and bitsandbytes installed"


def test_clients_are_silent_while_they_load(make, tiny_model, tmp_path, monkeypatch, capsys):
    pytest.importorskip("bitsandbytes")
    make("nf4", tiny_model("llama", num_hidden_layers=1), "-o", tmp_path / "nf4")
    load = transformers.AutoModelForCausalLM.from_pretrained

    def chatty(*arguments, **options):
        print("INFO a banner")
        print("a bar", file=sys.stderr)
        warnings.warn("x is deprecated", FutureWarning, stacklevel=2)
        logging.getLogger("torchao").warning("no GPU")
        return load(*arguments, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", chatty)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, found = engine.load(open_checkpoint(str(tmp_path / "nf4")), SMALL, 8)
    assert found.packed and capsys.readouterr() == ("", "")
    assert logging.root.manager.disable == 0


def test_prompts_are_the_seeds_and_of_the_middle_of_the_vocabulary():
    first = prompts.draw([50, 50], 512, "0")
    assert first == prompts.draw([50, 50], 512, "0") != prompts.draw([50, 50], 512, "1")
    assert [len(ids) for ids in first] == [50, 50] and first[0] != first[1]
    assert all(128 <= token < 256 for ids in first for token in ids)


def test_on_an_accelerator(tiny_model):
    folder = tiny_model("llama", num_hidden_layers=1)
    with accelerator.present():
        events = told(folder, replace(SMALL, device=accelerator.NAME))
        assert accelerator.DEVICE.launches
    runs = [event for event in events if event["event"] == "run"]
    assert [found["decode_tokens"] for found in runs] == [3] * 2 + [9] * 2


@pytest.mark.nightly
def test_llama_cpp_is_counted_from_what_arrives(tmp_path, tiny_model):
    pytest.importorskip("xllamacpp")
    path = gguf_files.export(tiny_model("llama"), tmp_path / "tiny.gguf")
    row = measure.open_models([str(path)], SMALL)[0]
    heard = list(measure.events(row.subject, row.engine, SMALL, SMALL.workloads))
    runs = [event for event in heard if event["event"] == "run"]
    assert [found["decode_tokens"] for found in runs if found["batch"] == 1] == [3] * 2
    assert all(0 < found["decode_tokens"] <= 9 for found in runs if found["batch"] == 3)
    # 256 tokens are laid out for each sequence; 2 bytes, 3 layers, 2 heads of 16
    assert [found["kv_bytes"] for found in runs] == [2 * 2 * 3 * 32 * 256 * n for n in (1, 1, 3, 3)]
    assert heard[0]["kernels"] == "llama.cpp ggml"


def test_tokens_that_came_while_others_were_prefilled_are_not_decoded():
    arrivals = [[(1.0, 1), (2.0, 2), (4.0, 4)], [(2.5, 1), (3.0, 2), (3.5, 4)]]
    found = runners.arrival_timing(0.5, arrivals, 8, None)
    assert found.prefill_seconds == 2.0
    assert (found.decode_seconds, found.decode_tokens) == (1.5, 8 - 2 - 1)
    assert found.step_seconds == [1.0, 1.0, 1.0]  # two tokens at once took two seconds
    with pytest.raises(QuantkitError, match="all tokens at once"):
        runners.arrival_timing(0.5, [[(1.0, 4)]], 4, None)


# ---- what cannot run


def test_points_that_cannot_run_are_refused_and_the_others_run(tiny_model):
    folder = tiny_model("llama", num_hidden_layers=1)  # made for 256 tokens
    asked = BenchSettings(
        batch="1", prompt_tokens="5,300", tokens=4, repeats=1, warmup=0, rounds=1, dtype="float32"
    )
    events = told(folder, asked)
    (refused,) = (event for event in events if event["event"] == "refused")
    assert refused["message"] == "300 prompt + 4 new tokens exceed the model's context of 256"
    assert [event["prompt"] for event in events if event["event"] == "run"] == [5]


def test_nothing_is_loaded_that_does_not_fit(tiny_model, monkeypatch):
    folder = tiny_model("llama", num_hidden_layers=1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=300_000))
    events = told(folder)
    assert [event["event"] for event in events] == ["refused", "refused"]
    assert "0.30 MB of memory are free" in events[0]["message"]
    assert "of weights, " in events[0]["message"]


def test_the_cache_of_llama_cpp_is_counted_as_it_is_allocated(tmp_path, tiny_model):
    """5 + 4 tokens of a sequence take the room of 256."""
    path = gguf_files.export(tiny_model("llama", num_hidden_layers=1), tmp_path / "model.gguf")
    opened, work = measure.open_subject(str(path)), Workload(100, 5)
    messages = [
        worker.refusal(opened, SimpleNamespace(device=device, dtype="float16", packed=True), work, 4, free=0)
        for device in (None, torch.device("cpu"))
    ]
    # 2 bytes, keys and values, 1 layer, 2 heads of 16, 100 sequences
    assert "3.28 MB of keys and values" in messages[0]  # 2 * 2 * 32 * 100 * 256 bytes
    assert "0.12 MB of keys and values" in messages[1]  # 2 * 2 * 32 * 100 * 9


@pytest.mark.parametrize(("capable", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_auto_is_planned_in_the_precision_that_runs(tiny_model, monkeypatch, capable, dtype):
    monkeypatch.setattr(processor, "has_bfloat16", lambda: capable)
    planned = []

    def refuse(subject, runner, work, tokens, free):
        planned.append(runner.dtype)
        return "too large"

    monkeypatch.setattr(worker, "refusal", refuse)
    told(tiny_model("llama", num_hidden_layers=1, dtype="bfloat16"), replace(SMALL, dtype="auto"))
    assert set(planned) == {dtype}


def test_memory_that_runs_out_in_a_run_is_that_points(tiny_model, monkeypatch):
    folder = tiny_model("llama", num_hidden_layers=1)
    ran = runners.TransformersRunner.run

    def failing(self, prompts, tokens):
        if len(prompts) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return ran(self, prompts, tokens)

    monkeypatch.setattr(runners.TransformersRunner, "run", failing)
    events = told(folder)
    (refused,) = (event for event in events if event["event"] == "refused")
    assert refused["batch"] == 3 and "allocate" in refused["message"]
    assert sum(event["event"] == "run" for event in events) == 2


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by the system"),
        ("import sys; sys.exit('libfoo.so is missing')", "ended with exit code 1: libfoo.so is missing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV"),
        ('import os; print(\'{"event": "do\', end="", flush=True); os._exit(3)', "ended with exit code 3"),
        ('print(\'{"event": "failed", "message": "no fix"}\')', "no fix"),
    ],
)
def test_a_worker_that_dies_is_a_row_that_says_why(tmp_path, monkeypatch, body, reason):
    (tmp_path / "dying.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(measure, "MODULE", "dying")
    well = measured("well", SMALL, lambda batch, number: 0.01)
    dead = measure.ModelRuns(subject("dead"), "transformers")
    measure.measure([dead], SMALL)
    assert reason in dead.error
    made = checked(record([well, dead], SMALL))
    assert [point["error"] for point in made["models"][1]["points"]] == [dead.error] * 2
    assert made["models"][0]["points"][0]["decode"]["median"] == pytest.approx(100)
    assert show.failures(made) == [f"dead: {dead.error}"]


def test_a_worker_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    """Which may be a model that somebody downloaded."""
    (tmp_path / "modules").mkdir()
    body = """import json; print(json.dumps({"event": "failed", "message": "no fix"}))"""
    (tmp_path / "modules" / "failing.py").write_text(body)
    (tmp_path / "json.py").write_text("raise SystemExit('code of the model')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setattr(measure, "MODULE", "failing")
    (event,) = measure.events(subject("m"), "transformers", SMALL, SMALL.workloads)
    assert event["message"] == "no fix"


def test_an_engine_that_cannot_run_a_checkpoint_is_a_row(tiny_model):
    folder = tiny_model("llama", num_hidden_layers=1)
    rows = measure.open_models([str(folder)], replace(SMALL, engine="transformers,llama.cpp"))
    assert [row.engine for row in rows] == ["transformers", "llama.cpp"]
    assert len(measure.open_models([str(folder)], replace(SMALL, engine="auto,transformers"))) == 1
    assert rows[0].error is None and "llama.cpp runs GGUF files" in rows[1].error
    measure.measure(rows[1:], SMALL)
    with pytest.raises(QuantkitError, match="nothing ran: .*GGUF") as raised:
        measure.refuse_empty(record(rows[1:], SMALL))
    checked(raised.value.record())


def test_gguf_runs_decoded_without_llama_cpp_and_says_so(tmp_path, tiny_model, monkeypatch):
    path = gguf_files.export(tiny_model("llama"), tmp_path / "tiny.gguf")
    monkeypatch.setattr(choose, "installed", lambda name: False)
    auto, other = measure.open_models([str(path)], replace(SMALL, engine="auto,llama.cpp"))
    assert auto.engine == "transformers" and "llama.cpp is not installed" in auto.note
    assert "not installed" in other.error


# ---- the command


def test_the_whole_of_it(quantkit, tiny_model, tmp_path):
    """One that runs and one that does not: a record and plots."""
    folder = tiny_model("llama", num_hidden_layers=1)
    plot = tmp_path / "plot.svg"
    engines = ["--engine", "transformers,llama.cpp", "--threads", "1"]
    asked = [*QUICK, *engines, "--batch", "1,2,3", "--plot", plot]
    done = quantkit("bench", folder, *asked, "--json", "-q")
    assert done.code == 0, done.err
    made = checked(json.loads(done.out))
    well, dead = made["models"]
    assert all(point["decode"]["median"] > 0 for point in well["points"])
    assert well["engine"]["kernels"] == "torch Linear"
    assert "llama.cpp runs GGUF files" in dead["error"] and f"warning: {folder}: llama.cpp" in done.err
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "1,x"], "--batch '1,x' is not a list of numbers"),
        (["--prompt-tokens", ""], "--prompt-tokens '' is not a list"),
        (["--batch", "0"], "--batch 0 is invalid"),
        (["--tokens", "1"], "--tokens 1 is invalid"),
        (["--repeats", "0"], "--repeats 0 is invalid"),
        (["--threads", "0"], "--threads 0 is invalid"),
        (["--engine", "lama.cpp"], "no engine 'lama.cpp'"),
        (["--engine", "vllm"], "bench does not run vLLM"),
        (["--plot", "plot.pdf"], "plots are .svg or .png"),
        (["--concurrency", "4"], "no such option: --concurrency"),
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
    assert refuse(2, "bench")[0] == "missing argument 'models'"


def test_a_peak_that_cannot_be_reset_is_measured_all_the_same(monkeypatch, tmp_path):
    """As in a container whose /proc is read-only."""
    monkeypatch.setattr(memory, "RESET", tmp_path / "absent" / "clear_refs")
    meter = memory.Meter()
    meter.reset()
    assert meter.peak() >= 0


def test_lists_and_threads(monkeypatch):
    assert BenchSettings(batch=" 8,1, 2,1").numbers("batch") == (1, 2, 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert BenchSettings().cores == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert 1 <= BenchSettings().cores <= os.cpu_count()
    assert bench_runs.FACTS["how"] == memory.Meter().how
