"""What a job takes: the forecast from headers is the plan from the model's modules."""

import json
from dataclasses import replace

import gguf_files
import pytest
from families import FAMILIES, KINDS, save_model, save_tokenizer
from jobs import quantize
from nights import by_day
from published import CONFIGS, gated
from speed_of_tests import SPEED
from test_experts_fused import MIXTURES

from quantkit.capacity import duration, formats, job, source, speed
from quantkit.capacity.question import Question
from quantkit.capacity.speed import of_machine  # not the one that conftest.py puts in its place
from quantkit.errors import QuantkitError
from quantkit.grids import parallel
from quantkit.layouts import Statistic
from quantkit.models.machine import memory as machine_memory
from quantkit.models.machine import processor
from quantkit.models.machine.device import choose_dtype
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize import job as jobs
from quantkit.quantize import methods
from quantkit.quantize.prepare import memory, plan
from quantkit.quantize.prepare.shapes import Shapes
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers import replay

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def forecast(folder):
    return job.of_model(source.read(str(folder)), Question(samples=8, seqlen=64))


def of_config(config: str | dict, device: str | None = None, **asked: int):
    config = CONFIGS[config] if isinstance(config, str) else config
    found = source.Source("a model", source.from_config(config), "config.json")
    return job.of_model(found, Question(gpu=device, **asked))


SHAPED = ["llama", "tied", "qwen2", "gpt2", "phi3", "opt", "falcon", "gpt_neox"]


@pytest.mark.processor
@pytest.mark.parametrize("method", ["int8", "nf4", "gptq", "awq", "gguf"])
@pytest.mark.parametrize("family", by_day(SHAPED, ["tied", "gpt2", "phi3"]))
def test_the_forecast_is_the_plan(family, method, tmp_path, monkeypatch):
    """To the byte: memory, disk and output. The plan knows shapes from the modules of the model."""
    agree(family, method, tmp_path, monkeypatch)


@pytest.mark.processor
@pytest.mark.parametrize("method", ["int8", "nf4", "gptq", "awq"])
def test_the_forecast_of_a_mixture_is_the_plan(method, tmp_path, monkeypatch):
    """Of which two experts are in memory, unless there is a transform."""
    agree("mixtral", method, tmp_path, monkeypatch)


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe"])
def test_the_forecast_of_experts_in_one_tensor_is_the_plan(family, tmp_path, monkeypatch):
    monkeypatch.setattr("families.FAMILIES", FAMILIES | MIXTURES)
    agree(family, "gptq", tmp_path, monkeypatch)


@pytest.mark.parametrize("file_type", ["Q8_0", "NVFP4"])
def test_the_forecast_of_a_gguf_file_is_the_plan(file_type, tmp_path, monkeypatch):
    """Its embedding becomes float32 in a folder; the scales of NVFP4 are no parameters."""
    monkeypatch.chdir(tmp_path)
    folder = save_model(tmp_path / "llama", "llama", dtype="bfloat16", **WIDE)
    save_tokenizer(folder)
    path, options = tmp_path / "model.gguf", {"type": (file_type,), "solver": "rtn", "imatrix": "none"}
    quantize("gguf", folder, path, options)
    found = source.read(str(path))
    assert found.parameters.count == source.read(str(folder)).parameters.count
    run = RunOptions(threads=1, batch_size=8, allow_requantize=True)
    for method in ("gptq", "int8"):
        text = CalibrationOptions(samples=8, seqlen=64)
        request = jobs.Request(str(path), methods.create(method), text, run)
        expected = jobs.prepare(request, Progress(), dry_run=True).plan
        planned = forecast(path)[method]
        assert planned["disk_bytes"] == expected.disk_bytes
        assert planned["output_bytes"] == expected.output_bytes
        assert planned["above_interpreter_bytes"] == expected.memory_bytes


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("width", [1536, 1528])
def test_the_forecast_without_a_group_size_is_the_plan(method, width, tmp_path, monkeypatch):
    """128 does not divide 576 columns, and 32 does not divide 1528."""
    sizes = {
        "hidden_size": 576,
        "intermediate_size": width,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    agree("llama", method, tmp_path, monkeypatch, **sizes)


def agree(family, method, tmp_path, monkeypatch, **other) -> None:
    """The forecast from the headers of a model, and the plan of a job on it."""
    monkeypatch.chdir(tmp_path)
    tied, family = family == "tied", "llama" if family == "tied" else family
    sizes = {"ffn_dim": 512, "word_embed_proj_dim": 256} if family == "opt" else {}
    arguments = (FAMILIES | KINDS | MIXTURES)[family][1]
    sizes |= {key: value for key, value in WIDE.items() if key in arguments} | other
    folder = save_model(tmp_path / family, family, dtype="bfloat16", tie_word_embeddings=tied, **sizes)
    save_tokenizer(folder)
    text = CalibrationOptions(samples=8, seqlen=64)
    request = jobs.Request(
        str(folder), methods.create(method), text, RunOptions(threads=1, batch_size=8, allow_unread=True)
    )
    found = forecast(folder)[method]
    if found["peak_memory_bytes"] is None:
        assert method in ("awq", "gguf")
        with pytest.raises(QuantkitError):
            jobs.prepare(request, Progress(), dry_run=True)
        return
    expected = jobs.prepare(request, Progress(), dry_run=True).plan
    assert found["above_interpreter_bytes"] == expected.memory_bytes
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert found["peak_memory_bytes"] == expected.memory_bytes + job.python_bytes(vocabulary, gguf=False)
    assert (found["disk_bytes"], found["output_bytes"]) == (expected.disk_bytes, expected.output_bytes)
    assert found["dtype"] == expected.execution.dtype
    assert found["sequential"] in (expected.execution.sequential, None)


@pytest.mark.processor
def test_precision_of_the_forward_pass_is_the_plan_s():
    import torch

    for stored, name in (("bfloat16", "BF16"), ("float16", "F16"), ("float32", "F32")):
        chosen = choose_dtype("auto", name, torch.device("cpu"))
        assert job.compute_dtype(stored, on_gpu=False) == chosen
        assert chosen == ("bfloat16" if stored == "bfloat16" and processor.has_bfloat16() else "float32")
        assert job.compute_dtype(stored, on_gpu=True) == stored


def test_memory_does_not_grow_with_depth():
    shallow, deep = (
        of_config(gated("llama", 4096, 11008, layers, 32, 32, 32000), samples=8) for layers in (8, 64)
    )
    for method in methods.available():
        assert shallow[method]["peak_memory_bytes"] == deep[method]["peak_memory_bytes"]


def test_a_gpu_that_is_short_of_memory_keeps_states_on_the_host():
    roomy = of_config("Llama-2-7b", "h100-80g")["gptq"]
    tight = of_config("Llama-2-7b", "h100-80g", samples=32768)["gptq"]
    assert (roomy["states"], tight["states"]) == ("device", "host")
    assert roomy["dtype"] == "bfloat16" and roomy["device"] == "h100-80g" and roomy["fits"]
    none = of_config("Llama-2-70b", "rtx-3060", samples=1024)["gptq"]
    assert none["fits"] is False and none["remedy"] is None


def test_a_job_that_needs_too_much_names_what_would_fit(monkeypatch):
    """Of `--samples`, after what the job chooses by itself."""
    formats.names()  # kept for later tests, with all methods
    monkeypatch.setattr(methods, "available", lambda: ["gptq"])
    found = source.Source("a model", source.from_config(CONFIGS["Llama-2-7b"]), "config.json")
    python = job.python_bytes(32_000, gguf=False)

    def with_room(gib: float) -> dict:
        nbytes = int(gib * 2**30) + python
        monkeypatch.setattr(job, "room", lambda: machine_memory.Room(nbytes))
        return job.of_model(found, Question(samples=512))["gptq"]

    roomy, tight, small, tiny = map(with_room, (64, 24, 9, 2))
    assert (roomy["sequential"], roomy["states"], roomy["remedy"]) == ("suspend", "device", None)
    assert (tight["sequential"], tight["fits"], tight["remedy"]) == ("repeat", True, None)
    assert small["fits"] is False and tiny["remedy"] is None
    flags, nbytes = small["remedy"].values()
    assert flags == "--samples 256 --sequential repeat --states disk"
    assert nbytes - python <= 9 * 2**30 < small["above_interpreter_bytes"]


@pytest.mark.parametrize("method", ["nf4", "gptq"])
def test_the_tokenizer_is_loaded_before_memory_is_planned(tiny_model, tmp_path, monkeypatch, method):
    """Else a job would plan with memory that its tokenizer takes later."""
    loaded, decide = [], plan.decide

    def watched(skeleton, *rest):
        loaded.append("tokenizer" in vars(skeleton.checkpoint))
        return decide(skeleton, *rest)

    monkeypatch.setattr(plan, "decide", watched)
    folder, text = tiny_model("llama", tokenizer=True), CalibrationOptions(samples=4, seqlen=32)
    run = RunOptions(threads=1)
    request = jobs.Request(str(folder), methods.create(method), text, run, output=tmp_path / "out")
    jobs.prepare(request, Progress())
    assert loaded == [True]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_file_holds_its_tokens_twice(tiny_model, tmp_path, kind):
    """In its header, too, also if no weight is quantized."""
    folder = tiny_model("llama", tokenizer=True)
    path = gguf_files.export(folder, tmp_path / "model.gguf", kind)
    found, file = (job.of_model(source.read(str(place)), Question())["nf4"] for place in (folder, path))
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    for record, gguf in ((found, False), (file, True)):
        python = record["peak_memory_bytes"] - record["above_interpreter_bytes"]
        assert python == job.INTERPRETER_BYTES + job.TOKEN_BYTES * vocabulary * (2 if gguf else 1)


def test_times_on_this_machine_come_from_the_benchmark():
    here = of_config("Llama-2-7b", threads=4)
    for row in here.values():
        assert row["seconds"] > duration.START and row["seconds_factor"] == 2
        assert row["basis"] == "a benchmark of this machine with 4 threads"
    assert 10 * here["nf4"]["seconds"] < min(here[method]["seconds"] for method in ("gptq", "awq", "gguf"))
    assert of_config("Llama-2-7b", threads=1)["gptq"]["seconds"] > 1.3 * here["gptq"]["seconds"]


def test_times_on_a_gpu_are_known_where_they_were_measured():
    """A model of Llama-3-8B's shapes took 49 s there, and 58 with imports and a dry run."""
    config = gated("llama", 4096, 14336, 32, 32, 8, 128256)
    measured, like, other = (
        of_config(config, name)["gptq"] for name in ("h200", "h100-pcie-80g", "rtx-3060")
    )
    assert measured["seconds"] == pytest.approx(54.7, abs=0.3)
    assert like["seconds"] - duration.START == pytest.approx(48.2 * 989 / 756, rel=0.01)
    assert (measured["seconds_factor"], like["seconds_factor"], other["seconds_factor"]) == (2, 3, None)
    assert other["seconds"] is None and other["basis"].startswith("unknown on this device")
    apple = of_config(config, "m3-max")["gptq"]
    assert apple["seconds"] is None and apple["device"] == "cpu"


@pytest.mark.parametrize(
    "method, tokens, seconds", [("gptq", 64 * 512, 207), ("gguf", 64 * 512, 310), ("int8", 64 * 512, 12)]
)
def test_predicted_time_of_a_measured_job(method, tokens, seconds):
    """CPU seconds of SmolLM2-135M with one thread (docs/measurements/real-models.md), and of the start."""
    config = gated("llama", 576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True)
    found = of_config(config, samples=tokens // 512, seqlen=512, threads=1)[method]["seconds"]
    assert seconds / 2 < found < 2 * seconds


def test_a_token_costs_what_its_experts_cost():
    dense, sparse = (
        duration.model_of(
            source.Source("", source.from_config(CONFIGS[name]), ""), SPEED
        ) for name in ("Mistral-7B", "Mixtral-8x7B")
    )  # fmt: skip
    mlp = 3 * 4096 * 14336 * 32
    assert sum(site.weights for site in sparse.sites) - sum(site.weights for site in dense.sites) == 7 * mlp
    assert sum(site.share * site.weights for site in sparse.sites) == pytest.approx(
        sum(site.weights for site in dense.sites) + mlp
    )


def test_a_vocabulary_takes_time_in_gguf_files_whose_head_is_solved():
    def seconds(method: str, vocabulary: int) -> float:
        config = gated("llama", 512, 1408, 2, 8, 8, vocabulary)
        return of_config(config, samples=8, seqlen=256, threads=1)[method]["seconds"]

    more = {method: seconds(method, 65536) - seconds(method, 4096) for method in ("gptq", "gguf")}
    work, model = methods.load("gguf").work, duration.Model([], 0, duration.Site(0, 512), SPEED)
    large, small = (model.solve(work, [duration.Site(rows, 512)]) for rows in (65536, 4096))
    assert more["gguf"] - more["gptq"] >= large - small > 0 < more["gptq"]


def test_the_benchmark_runs_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs = []
    monkeypatch.setattr(speed, "measure", lambda dtype: runs.append(dtype) or SPEED)
    assert of_machine("bfloat16") == of_machine("bfloat16") == SPEED and runs == ["bfloat16"]
    assert of_machine("float32") == SPEED and runs == ["bfloat16", "float32"]
    kept = tmp_path / "quantkit" / "speed.json"
    for damaged in ("{", "[]", '{"x": 1}', kept.read_text().replace("1.2e-07", '"fast"')):
        kept.write_text(damaged)
        assert of_machine("float32") == of_machine("float32") == SPEED
    assert runs[2:] == ["float32"] * 4
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))  # a file, in which no folder can be made
    assert of_machine("float32") == SPEED and len(runs) == 7


def test_the_benchmark_measures_every_rate(monkeypatch):
    import torch

    for name, number in {
        "TOKENS": 64,
        "SEQLEN": 32,
        "HIDDEN": 128,
        "INNER": 64,
        "FEW": 8,
        "MANY": 16,
    }.items():
        monkeypatch.setattr(speed, name, number)
    monkeypatch.setattr(speed, "BYTES", 1 << 12)
    ticks = iter(range(10_000))
    monkeypatch.setattr(speed.time, "thread_time", lambda: next(ticks))  # every run takes one second
    before = torch.get_num_threads()
    found = speed.measure("float32")
    assert found.product == found.float32 == found.moment == 1 / (64 * 64 * 64)
    assert found.byte == 2**-12 and found.weight == 0 and found.column == 1 / 128
    assert torch.get_num_threads() == before


def test_what_quantkit_refuses_has_no_forecast():
    assert "no GGUF architecture" in of_config("gemma-7b")["gguf"]["reason"]
    assert "Conv1D" in of_config("gpt2")["awq"]["reason"] and of_config("gpt2")["gptq"]["seconds"]


def test_the_peak_is_the_sum_of_what_each_stage_says():
    linears = [("attn.q", 4, 4), ("mlp.up", 8, 4), ("mlp.down", 4, 8)]
    shapes = Shapes(linears, rest=100, largest=10, element=2, tokens=32, batch_tokens=16)
    batch, states = 16 * (2 * (3 * 4 + 4 * 8) + 4 * 8), 2 * 32 * 4
    stages = memory.Stages(shapes, {Statistic.HESSIAN}, suspend=True)
    expected = {
        "block": 2 * (16 + 32 + 32),
        "hidden states": states,
        "waiting batches": 2 * 32 * (2 * 4 + 8),
        "graphs": 0,
        "sites": 4 * 8**2 + batch,  # measuring mlp.down; solving it takes less:
        "experts": 0,
    }
    assert stages.solve(shapes.sites[-1]) == 4 * 8**2 * 9 // 4 + 22 * 32 < expected["sites"]
    assert stages.computing() == expected
    with_holes = int(memory.HEAP * sum(expected.values()))
    assert memory.peak_memory(stages).host == memory.LOADED_LATER_BYTES + 2 * 100 + with_holes
    outside = replace(stages, shapes=replace(shapes, largest=10**6), outside=True)
    twice = 2 * 10**6 + memory.ROUNDED * 32  # stored and encoded, and the linear that is being solved
    assert memory.peak_memory(outside).host == memory.LOADED_LATER_BYTES + 2 * 100 + twice


def test_limits_of_the_solvers_are_those_that_are_planned():
    assert (memory.GRAPHED, memory.SEARCH_VALUES) == (replay.LARGEST, parallel.WHOLE)


def test_inputs_of_the_original_model_are_freed_site_by_site():
    linears = [("attn.q", 4, 4), ("mlp.up", 8, 4), ("mlp.down", 4, 8), ("expert.1.up", 8, 4)]
    shapes = Shapes(
        linears,
        rest=100,
        largest=10,
        element=2,
        tokens=64,
        batch_tokens=16,
        experts=frozenset({"expert.1.up"}),
    )
    drifts = {Statistic.HESSIAN, Statistic.DRIFT}
    stages, sampled = memory.Stages(shapes, drifts), 2 * 32
    assert stages.sampled == sampled and stages.original == (4 * 4 + 4 + 4 + 8) * sampled
    down = 2 * 4 * 8**2 + 2 * 4 * 4 * 8  # two Hessians, and two halves of the rows that are fewer
    assert stages.sites == down + shapes.batch + (4 * 4 + 8) * sampled
