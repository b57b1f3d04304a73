"""`quantkit auto`: a budget is kept, the better is kept, recipes repeat the bytes, tables are used again."""

import errno
import fcntl
import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import jobs
import pytest
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from quantkit.auto import allocation, results, run, show, unit_divergence
from quantkit.auto.sensitivities import Sensitivities
from quantkit.auto.units import nbytes, usual
from quantkit.capacity import devices
from quantkit.models.files.open import open_checkpoint
from quantkit.quantize import loop
from quantkit.quantize.prepare import plan, recipe
from quantkit.quantize.staging.folder import Staging

pytestmark = pytest.mark.usefixtures("few_tokens")
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
SMALL = ["--search-tokens", "64", "--threads", "1", "--dtype", "float32", "--engine", "transformers"]


@pytest.fixture
def source(tiny_model) -> Path:
    return tiny_model("llama", tokenizer=True, **SIZES)


@pytest.fixture
def auto(quantkit, source, tmp_path):
    """`auto("--bpw", 3.5, ...)`: the record."""
    text = jobs.calibration(tmp_path).calibration
    calibrated = ["--calibration", text, "--samples", "8", "--seqlen", "32"]

    def search(*arguments, code: int = 0):
        done = quantkit("auto", source, *SMALL, *calibrated, *arguments, "--json", "-q")
        assert done.code == code, done.err
        if "llama.cpp" not in arguments:  # of files that are made only to compare
            assert " instead of Q" not in done.err
        return done.err if code else json.loads(done.out)

    return search


def test_a_recipe_repeats_the_bytes_and_a_table_saves_the_search(auto, quantkit, tmp_path, monkeypatch):
    asked = ["-o", "found", "--recipe-out", "best.yaml", "--sensitivities", "table.json"]
    signed, discard = [], Staging.discard

    def read(staging):
        signed.append((staging.folder / "fingerprint.json").read_text())
        discard(staging)

    monkeypatch.setattr(Staging, "discard", read)
    found = auto("--bpw", "4.2", *asked)
    monkeypatch.setattr(Staging, "discard", discard)
    assert found["searched"]["bits_per_weight"] <= 4.2 and found["kept"] in ("searched", "uniform")
    assert found["searched"]["kld"] > 0 and found["searched"]["predicted_kld"] > 0
    assert found["uniform"]["bits_per_weight"] <= 4.2
    assert sorted(path.name for path in tmp_path.iterdir() if "found" in path.name) == ["found"]
    (tmp_path / "again").mkdir()
    done = quantkit("run", "best.yaml", "-o", "again/found", "-q")
    assert done.code == 0, done.err
    assert jobs.contents(tmp_path / "again" / "found") == jobs.contents(tmp_path / "found")
    _check_finished(auto, tmp_path, asked, signed[-1])
    monkeypatch.setattr(run, "measure", None)  # the table says it all
    more = auto("--bpw", "6", "-o", "larger", "--sensitivities", "table.json")
    assert more["searched"]["predicted_kld"] < found["searched"]["predicted_kld"]
    assert more["sensitivities_read"] and not found["sensitivities_read"]
    refused = auto("--bpw", "4", "-o", "x", "--sensitivities", "table.json", "--exclude", "k_proj", code=2)
    assert "table.json holds sensitivities of another search; different:" in refused


def _check_finished(auto, folder: Path, asked: list[str], signed: str) -> None:
    """--resume does nothing more, also after a kill that left the search's folder. Others are refused."""
    before, typed = _files(folder), ["--bpw", "4.2", *asked, "--resume"]
    assert auto(*typed) == {"schema": "quantkit.auto/1", "output": "found", "finished": True}
    assert auto(*typed, "--search-streams", "3")["finished"] and auto(*typed, "--dry-run")["refused"] is None
    assert auto(*typed, "--overwrite")["finished"], "as for other jobs"
    said = auto(*typed, "--recipe-out", "more.yaml", code=2)
    assert "found is finished, but more.yaml was not written\nhint: leave more.yaml out, or search" in said
    for other in (["--bpw", "5", *asked], [*typed, "--search-tokens", "96"], [*typed, "--exclude", "k_proj"]):
        said = auto(*other, "--resume", code=2)
        assert "found is the finished output of another job; different: options, model or texts" in said
    assert _files(folder) == before
    (folder / "found.auto" / "replaced").mkdir(parents=True)
    (folder / "found.auto" / "fingerprint.json").write_text(signed)
    assert auto(*typed)["finished"] and _files(folder) == before
    best = recipe.load("best.yaml")
    for changed in ([], ["samples=4"]):
        assert recipe.merge(best, changed, {"output": "x"}).searched == ("" if changed else best.searched)


@pytest.mark.nightly
def test_what_is_no_better_is_not_kept(auto, quantkit, tmp_path, monkeypatch):
    """The allocation is a bad one: most at 2 bits, some at 8. The uniform preset of its size stays."""

    def bad(units, losses, budget):
        choice = {unit.name: [*unit.candidates][0] for unit in units}
        for unit in units:
            better = choice | {unit.name: [*unit.candidates][-1]}
            choice = better if nbytes(units, better) <= budget else choice
        return choice

    monkeypatch.setattr(allocation, "within_bytes", bad)
    found = auto("--bpw", "5.2", "-o", "kept", "--recipe-out", "kept.yaml")
    assert found["kept"] == "uniform" and found["searched"]["kld"] >= found["uniform"]["kld"]
    manifest = json.loads((tmp_path / "kept" / "quantkit.json").read_text())
    assert not manifest["job"]["override"] and "override" not in (tmp_path / "kept.yaml").read_text()


@pytest.mark.nightly
def test_a_divergence_is_kept_within(auto):
    found = auto("--max-kld", "0.002", "-o", "close")
    assert found["reached"] and found["searched"]["kld"] <= 0.002
    assert 1 <= len(found["tried"]) <= 4
    within = [one["chosen_bytes"] for one in found["tried"] if one["kld"] <= 0.002]
    assert found["searched"]["chosen_bytes"] == min(within)


def test_a_size_holds_all_files(auto, tmp_path, monkeypatch):
    """With room for manifest and recipe, so that nothing is made twice."""
    asked = ["--sensitivities", "table.json", "--head", "4"]
    whole = auto("--bpw", "5", "-o", "whole", *asked)["searched"]["disk_bytes"]
    made, make = [], results.Search._made
    monkeypatch.setattr(results.Search, "_made", lambda *given: made.append(given) or make(*given))
    found = auto("--max-size", f"{whole}B", "-o", "sized", *asked)
    assert len(made) == 1
    assert open_checkpoint(str(tmp_path / "sized")).is_quantized("lm_head.weight")
    assert found["searched"]["disk_bytes"] <= whole
    assert sum(path.stat().st_size for path in (tmp_path / "sized").iterdir()) <= whole


MEMORY = 12 << 30  # of an rtx-3060, of which nine tenths are used
PER_TOKEN = 6 * 2 * 2 * 64  # values of the demo model: layers, keys and values, heads, size of a head


@pytest.mark.nightly
def test_what_a_device_leaves_to_the_weights_is_counted(quantkit, demo_model):
    """Against the formula by hand, and the fixed bytes that --max-size subtracts."""

    def planned(*arguments) -> dict:
        words = ["--engine", "llama.cpp", "--samples", "8", "--dry-run", "--json", "-q"]
        return json.loads(quantkit("auto", demo_model, *words, *arguments).out)

    fixed = 4_000_000 - planned("--max-size", "4MB")["budget_bytes"]
    found = planned("--gpu", "RTX 3060", "--ctx", "512", "--batch", "7371")
    rows = {(row["ctx"], row["cache"]): row for row in found["rooms"]}
    assert list(rows) == [(ctx, cache) for ctx in (512, 256) for cache in ("float16", "q8_0", "q4_0")]
    room = int(0.9 * MEMORY) - 7371 * 512 * PER_TOKEN * 2 - fixed
    assert rows[512, "float16"]["bytes"] == room
    assert rows[512, "float16"]["bits"] == pytest.approx(8 * room / found["weights"])
    assert {row["bits"] for row in rows.values()} == {rows[512, "float16"]["bits"], found["most_bits"]}
    assert found["budget_bytes"] == rows[512, "q4_0"]["bytes"] and "cache" not in found
    crowded = ["--gpu", "rtx-3060", "--ctx", "512", "--batch", "30000", "--engine", "llama.cpp"]
    refused = quantkit("auto", demo_model, *crowded, "--samples", "8", "--dry-run")
    assert refused.code == 4 and "too small" in refused.err and "less --ctx or --batch" in refused.err


@pytest.mark.nightly
def test_bits_and_the_type_of_the_cache_are_chosen_together(auto, quantkit, source, tmp_path, monkeypatch):
    gib = 0.00038  # with a cache of 16 bit, 5 bits a weight are left
    monkeypatch.setitem(devices.DEVICES, "toy", devices.Device("toy", "cuda", gib, 1.0, 1.0))
    text = ["--text", "calibration.txt", "--ctx", "64", "--limit", "1024"]
    found = auto("--engine", "vllm", "--gpu", "toy", "--batch", "8", "-o", "found", *text)
    whole = [row for row in found["rooms"] if row["ctx"] == 64]
    assert [row["cache"] for row in whole] == ["bfloat16", "fp8"] and whole[0]["bits"] < 6 < whole[1]["bits"]
    assert 0 < whole[0]["cache_kld"] < whole[1]["cache_kld"] < whole[0]["predicted_kld"]
    assert found["cache"] == "fp8", "the weights lose more by few bits than the cache does"
    cache = 8 * 64 * 2 * 2 * 16  # one layer with keys and values of two heads of 16
    assert found["searched"]["output_bytes"] + cache <= 0.9 * gib * 2**30
    done = quantkit("eval", source, "found", *text, "--kv-dtype", "fp8", "--dtype", "float32", "--json", "-q")
    rows = json.loads(done.out)["models"]
    assert [row["kv"] and row["kv"]["dtype"] for row in rows] == [None, "fp8", None, "fp8"]
    assert rows[3]["metrics"]["kld"]["mean"] == pytest.approx(found[found["kept"]]["kld"])
    assert rows[1]["metrics"]["kld"]["mean"] == pytest.approx(whole[1]["cache_kld"])


@pytest.mark.nightly
def test_an_interrupted_search_goes_on(auto, tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(results.loop, "run", stop)
        auto("--bpw", "4.2", "-o", "found", code=130)
    assert (tmp_path / "found.auto" / "sensitivities.json").is_file()
    assert "holds an unfinished job" in auto("--bpw", "4.2", "-o", "found", code=2)
    monkeypatch.setattr(run, "measure", None)
    found = auto("--bpw", "4.2", "-o", "found", "--resume")
    assert found["searched"]["bits_per_weight"] <= 4.2 and not (tmp_path / "found.auto").exists()


def test_measuring_that_was_interrupted_goes_on_to_the_same_table(auto, tmp_path, monkeypatch, request):
    """However many streams a walk has."""

    def units(name: str = "found.auto/sensitivities.json") -> dict:
        return json.loads((tmp_path / name).read_text())["units"]

    divergences, count, last = unit_divergence._divergences, 0, 7

    def counted(skeleton, reference, streams, *compared):
        nonlocal count
        count += len(streams)
        if last and count >= last:
            signal.raise_signal(signal.SIGINT)
        return divergences(skeleton, reference, streams, *compared)

    monkeypatch.setattr(unit_divergence, "_divergences", counted)
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, heard))
    asked = ["--bpw", "4.2", "-o", "found", "--sensitivities", "table.json"]
    stopped = auto(*asked, "--search-streams", "4", code=130)
    assert "interrupted; sensitivities of 4 of 7 units are kept in found.auto\n" in stopped
    assert "--resume" in stopped and len(units()) == 4 and not (tmp_path / "table.json").exists()
    count, last = 0, None
    auto(*asked, "--resume")
    assert count == 1 + 3, "the usual model again, but what was known is not measured again"

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(results.Search, "_made", stop)  # what would be made of it, other tests show
    auto("--bpw", "4.2", "-o", "whole", code=130)
    whole = units("whole.auto/sensitivities.json")
    assert units("table.json") == whole and len(whole) == 7


@pytest.mark.nightly
def test_a_budget_of_exactly_a_preset_is_compared_with_it(auto):
    """The search finds something that is a few bytes smaller, or larger than all other presets."""
    bits = auto("--bpw", "4", "--dry-run")["presets"]["3 bit g32"]
    found = auto("--bpw", repr(bits * (1 + 1e-9)), "-o", "found")
    assert found["uniform"]["bits_per_weight"] == bits


def test_a_full_disk_is_said_before_the_search(auto, quantkit, source, tmp_path, monkeypatch):
    asked = ["--calibration", jobs.calibration(tmp_path).calibration, "--samples", "8", "--seqlen", "32"]
    needs = auto("--bpw", "4", "--dry-run")["needs"]
    waiting = 2 * sum(p.numel() for p in _linears(source))
    assert needs["disk_bytes"] >= waiting and needs["memory_bytes"] == needs["host_bytes"] > 0
    assert needs["python_bytes"] > 4e8
    free = SimpleNamespace(free=needs["disk_bytes"] - 1)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: free)
    done = quantkit("auto", source, *SMALL, *asked, "--bpw", "4")
    assert done.code == 5 and "of disk" in done.err
    assert not list(tmp_path.glob("*.auto"))


def test_a_recipe_is_no_file_of_the_source(auto, source):
    config = (source / "config.json").read_bytes()
    inside = auto("--bpw", "5", "-o", "found", "--recipe-out", source / "config.json", code=2)
    assert "config.json is part of the source" in inside
    for flag in ("--recipe-out", "--sensitivities"):
        assert "no/file cannot be written" in auto("--bpw", "5", "-o", "found", flag, "no/file", code=2)
    assert (source / "config.json").read_bytes() == config


@pytest.mark.parametrize(
    ("typed", "message", "hint"),
    [
        ("64 --seqlen 128 --search-tokens 512", "units would be measured on 512", "--search-tokens 1000"),
        ("16 --seqlen 128", "units would be measured on 384", "--samples 64"),
        ("63 --seqlen 128", "results would be compared on 889", "--samples 64"),
        ("512 --seqlen 32", "results would be compared on 992", "--seqlen 33"),
    ],
)
def test_too_few_tokens_are_refused(quantkit, source, monkeypatch, typed, message, hint):
    monkeypatch.undo()  # the fixture that accepts few
    monkeypatch.chdir(source.parent)
    done = quantkit("auto", source, "--bpw", "4", "--dry-run", "--samples", *typed.split())
    said = " ".join(done.err.split())
    assert done.code == 2 and f"{message} tokens; 1000 are needed" in said and f"give {hint} or more" in said
    least = ["--samples", "64", "--seqlen", "128"]
    assert quantkit("auto", source, "--bpw", "4", "--dry-run", *least).code == 0


@pytest.mark.nightly
def test_any_engine_is_compared_with_a_gguf_file(auto, tmp_path):
    found = auto("--bpw", "6", "-o", "found", "--engine", "any", "--sensitivities", "table.json")
    kept, gguf = found[found["kept"]], found["gguf"]
    assert gguf["disk_bytes"] <= kept["disk_bytes"] and gguf["kld"] > 0 and gguf["predicted_kld"] is None
    assert [path.name for path in tmp_path.iterdir() if "found" in path.name] == ["found"]
    scale = found["uniform"]["kld"] / found["uniform"]["predicted_kld"]
    units = json.loads((tmp_path / "table.json").read_text())["units"]
    assert units.keys() == found["choice"].keys() and scale > 0


def _linears(source: Path) -> list[Tensor]:
    tensors = load_file(source / "model.safetensors")
    return [tensor for name, tensor in tensors.items() if name.endswith("proj.weight")]


def test_a_choice_of_many_types_is_read_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    kinds = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K", "IQ4_XS", "Q5_K"]
    choice = {f"blk.{k}.attn_k.weight": kind for k, kind in enumerate(reversed(kinds))}
    choice |= {"token_embd.weight": "Q5_K", "blk.9.attn_k.weight": "Q2_K"}
    show._print_choice(Console(highlight=False, markup=False, width=80), choice)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if "attn_k" in line]
    assert ["attn_k.weight", "5,", "9", "Q2_K"] in rows and len(rows) == len(kinds)
    assert ["token_embd.weight", "Q5_K"] in [line.split() for line in lines]


def test_a_result_is_whole_on_a_narrow_terminal(monkeypatch, capsys):
    """Both models, one figure per row."""
    monkeypatch.setenv("COLUMNS", "80")
    made = {
        "output_bytes": 123_456_789_012, "disk_bytes": 2e9, "bits_per_weight": 3.6, "ppl": 12.3,
        "predicted_kld": 0.02, "kld": 0.03, "kld_stderr": 0.001, "name": "3 bit g64",
    }  # fmt: skip
    show.print_record(
        {
            "rooms": [], "choice": {f"model.layers.{k}.mlp.up_proj": "2,64" for k in range(3)},
            "searched": made | {"name": "searched"}, "uniform": made, "cache": None,
            "measured_on": {"tokens": 9, "text": "text"},
            "gguf": made | {"name": "Q4_K_M", "kld": 0.003, "predicted_kld": None}, "kept": "searched",
            "output": "out", "reached": True, "seconds": 2,
            "sensitivities_read": False, "sensitivities_seconds": 1,
        }
    )  # fmt: skip
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mlp.up_proj", "0-2", "2", "bit", "g64"] in rows
    assert ["searched", "uniform"] in rows
    assert ["size", *["123.46", "GB"] * 2] in rows
    assert ["measured", "KL", "divergence", *["0.03000", "±", "0.00100"] * 2] in rows
    assert ["predicted", "KL", "divergence", "0.02000"] in rows
    assert ["as", "GGUF", "Q4_K_M,", "2.00", "GB:", "90%", "less"] in [row[:7] for row in rows]


@pytest.mark.parametrize(("engine", "flags"), [("vllm", ["--kv-dtype", "bfloat16"]), ("transformers", [])])
def test_serve_takes_the_flags_that_it_is_told(capsys, engine, flags):
    """transformers serve keeps its cache in the precision of the model, and has no --kv-dtype."""
    found = dict.fromkeys(("output_bytes", "disk_bytes", "bits_per_weight", "ppl", "kld", "kld_stderr"), 1.0)
    room = {"ctx": 256, "cache": "bfloat16", "bits": 4.0, "predicted_kld": 1.0, "cache_kld": 0.0}
    show.print_record(
        {
            "rooms": [room], "choice": {"model.layers.0.mlp.up_proj": "4,64"}, "engine": engine,
            "searched": found | {"predicted_kld": 1.0}, "uniform": None, "gguf": None, "cache": "bfloat16",
            "measured_on": {"tokens": 9, "text": "text"}, "kept": "searched", "budget": {"batch": 2},
            "output": "out", "reached": True, "seconds": 2,
            "sensitivities_read": False, "sensitivities_seconds": 1,
        }
    )  # fmt: skip
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("serve with")]
    assert line.split()[2:] == [*flags, "--ctx", "256", "--parallel", "2"]


def test_a_dry_run_says_what_there_is(auto, quantkit, source, tmp_path):
    found = auto("--bpw", "4", "--dry-run")
    assert found["units"] == 7 and found["presets"]["4 bit g32"] == pytest.approx(4.5, abs=0.1)
    assert found["least_bits"] < 4 < found["most_bits"] and not (tmp_path / "found.auto").exists()
    seconds = found["expected_seconds"]
    assert 4 < seconds < 600 and auto("--max-kld", "1", "--dry-run")["expected_seconds"] > seconds
    assert auto("--bpw", "6", "--engine", "llama.cpp", "--dry-run")["expected_seconds"] > 4
    (tmp_path / "old").mkdir()
    asked = "--bpw", "4", "-o", "old", "--dry-run"
    assert found["refused"] is None and auto(*asked)["refused"]["message"] == "old exists"
    assert "less than the 16 bits" in auto("--bpw", "40", code=2)
    refused = auto("--bpw", "1", code=4)
    assert "1.00 bits per weight is too small; the smallest possible result is 2." in refused
    refused = auto("--max-size", "1KB", code=4)
    said = r"0\.00 MB is too small; the smallest possible result is ([\d.]+) MB \(([\d.]+) bits per weight\)"
    size, bits = re.search(said, refused).groups()
    assert 0.02 < float(size) < 1 and float(bits) == pytest.approx(found["least_bits"], abs=0.01)


def test_an_interrupt_before_anything_is_kept_begins_again(auto, tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "measure", stop)
        stopped = auto("--bpw", "4.2", "-o", "found", code=130)
    assert "--resume" not in stopped and "hint: begin again with: quantkit auto" in stopped
    assert not (tmp_path / "found.auto").exists()


def _table(prepared) -> Sensitivities:
    """A whole table, as `measure` would have found it."""
    rows = {}
    for unit in prepared.units:
        errors = {name: 1 / size for name, size in unit.candidates.items()}
        divergence = {"mean": 0.1, "stderr": 0.0}
        rows[unit.name] = {"errors": {"nearest": errors, "solved": errors}, "divergence": divergence}
    return Sensitivities(prepared.identity, 64, 1.0, None, rows)


@pytest.fixture
def table(auto, tmp_path, monkeypatch) -> dict:
    def measured(prepared, progress, known):
        _table(prepared).save(tmp_path / "u.json")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "measure", measured)
        auto("--bpw", "4.2", "-o", "found", code=130)
    return json.loads((tmp_path / "u.json").read_text())


def _without_units(table: dict) -> str:
    return json.dumps({key: value for key, value in table.items() if key != "units"})


def _words(table: dict) -> str:
    return json.dumps(table | {"units": dict.fromkeys(table["units"], "x")})


def _other_candidates(table: dict) -> str:
    for unit in table["units"].values():
        unit["errors"]["nearest"] = {"3,7": 0.5}
    return json.dumps(table)


@pytest.mark.parametrize(
    "change, code, said",
    [
        (lambda table: "[" * 100_000, 2, "is not a table of sensitivities"),
        (_without_units, 4, "'units' is a required property"),
        (lambda table: json.dumps(table | {"seconds": float("nan")}), 2, "is not a table of sensitivities"),
        (
            lambda table: json.dumps(table).replace('"seconds": 1.0', '"seconds": 1e400'),
            2,
            "is not a table of sensitivities",
        ),
        (_words, 4, "'x' is not of type 'object'"),
        (_other_candidates, 2, "lacks candidates"),
    ],
)
def test_a_strange_table_is_refused_and_leaves_nothing(auto, tmp_path, table, change, code, said):
    (tmp_path / "u.json").write_text(change(table))
    refused = auto("--bpw", "4.2", "-o", "found", "--sensitivities", "u.json", code=code)
    assert said in refused and "leave out --sensitivities" in refused
    assert not (tmp_path / "found.auto").exists()


def test_a_pipe_is_no_table(auto, tmp_path):
    os.mkfifo(tmp_path / "u.json")
    refused = auto("--bpw", "4.2", "-o", "found", "--sensitivities", "u.json", code=4)
    assert "u.json is not a plain file" in refused and not (tmp_path / "found.auto").exists()


def test_a_table_is_written_through_no_name_that_can_be_guessed(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "u.json.tmp").symlink_to(tmp_path / "mine")
    Sensitivities({}, 64, 1.0, None, {}).save(tmp_path / "u.json")
    assert (tmp_path / "mine").read_text() == "mine"
    assert json.loads((tmp_path / "u.json").read_text())["tokens"] == 64


# ---- the folder of a search


def _stop(*arguments):
    raise KeyboardInterrupt


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def quick(monkeypatch):
    """Units are not measured."""
    monkeypatch.setattr(run, "measure", lambda prepared, *_: iter([_table(prepared)]))


@pytest.fixture
def unfinished(auto, quick, tmp_path, monkeypatch) -> Path:
    """The folder of a search that was interrupted when it had measured."""
    with monkeypatch.context() as patch:
        patch.setattr(results.Search, "_make", _stop)
        auto("--bpw", "4.2", "-o", "found", code=130)
    return tmp_path / "found.auto"


def test_a_choice_that_was_stopped_gives_way_to_another(auto, quick, tmp_path, monkeypatch):
    """The resumed search chooses other bits, as if the files of its first choice had been too large."""
    monkeypatch.setattr(results.Search, "uniform", lambda *_: None)
    ask = "--bpw", "6", "-o", "found"
    with monkeypatch.context() as patch:
        first = lambda units, *_: {unit.name: usual(unit) for unit in units}  # noqa: E731
        patch.setattr(allocation, "within_bytes", first)
        patch.setattr(loop.Loop, "_finished", _stop)
        auto(*ask, code=130)
    assert (tmp_path / "found.auto" / "searched" / "found.partial" / "fingerprint.json").exists()
    found = auto(*ask, "--resume")
    assert found["searched"]["bits_per_weight"] > 5


def test_a_search_in_use_is_left_alone(auto, unfinished):
    before = _files(unfinished)
    with open(unfinished / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for mode in ("--resume", "--overwrite"):
            said = auto("--bpw", "4.2", "-o", "found", mode, code=1)
            assert "error: found.auto is in use by another process\nhint: wait until it is done" in said
        refused = auto("--bpw", "4.2", "-o", "found", "--resume", "--dry-run")["refused"]
        assert refused["message"] == "found.auto is in use by another process"
    assert _files(unfinished) == before and "sensitivities.json" in before


def test_a_search_resumes_with_its_own_options_alone(auto, unfinished, monkeypatch):
    """The hint keeps what was measured."""
    before, name = _files(unfinished), "found.auto/sensitivities.json"
    said = auto("--bpw", "5", "-o", "found", "--resume", code=2)
    assert "error: found.auto holds another job; different: --bpw (4.2 there, 5.0 here)\n" in said
    assert f"or start again with --overwrite --sensitivities {name}" in said
    said = auto("--max-kld", "0.1", "-o", "found", "--resume", code=2)
    assert "--bpw (4.2 there, none here)" in said and "--max-kld (none there, 0.1 here)" in said
    assert _files(unfinished) == before
    monkeypatch.setattr(run, "measure", None)
    monkeypatch.setattr(results.Search, "_make", _stop)
    said = auto("--bpw", "5", "-o", "found", "--overwrite", "--sensitivities", name, code=130)
    assert "the table of sensitivities and the finished outputs are kept in found.auto" in said
    assert _files(unfinished)["sensitivities.json"] == before["sensitivities.json"]
    assert json.loads((unfinished / "fingerprint.json").read_text())["options"]["bpw"] == 5


@pytest.fixture
def made(quick, monkeypatch):
    """Outputs are one file, and nothing is measured."""

    def make(search, auto, preset, folder, predicted=None):
        path = search._auto.staging.folder / folder / auto.output.name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text("new")
        sizes = {"chosen_bytes": 1, "disk_bytes": 1}
        return results.Made(preset, path, "new recipe\n", sizes | {"predicted_kld": predicted, "kld": 1.0})

    monkeypatch.setattr(results.Search, "_make", make)


def test_a_context_that_the_model_lacks_is_refused(auto):
    assert "is longer than the context" in auto("--gpu", "t4", "--ctx", "100000", "--dry-run", code=2)


def test_the_disk_is_for_the_largest_result_at_most(auto):
    assert auto("--max-size", "900GB", "--dry-run")["needs"]["disk_bytes"] < 10e6


@pytest.mark.parametrize("mode", [["--resume"], ["--overwrite"], ["--overwrite", "--resume"]])
def test_a_stop_while_it_publishes_loses_no_output(auto, made, tmp_path, monkeypatch, mode):
    """The old output is out of the way, the new one not in its place yet."""
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "config.json").write_text("old")
    rename, left = os.rename, iter([1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *paths: rename(*paths) if next(left, 0) else _stop())
        auto("--bpw", "4.2", "-o", "found", "--overwrite", code=130)
    assert _files(tmp_path / "found.auto" / "replaced") == {"found/config.json": b"old"}
    if mode == ["--resume"]:
        assert "error: found exists\n" in auto("--bpw", "4.2", "-o", "found", *mode, code=2)
        assert _files(tmp_path / "found") == {"config.json": b"old"}
        assert (tmp_path / "found.auto" / "sensitivities.json").exists()
        return
    with monkeypatch.context() as patch:
        patch.setattr(results.Search, "_make", _stop)
        auto("--bpw", "4.2", "-o", "found", *mode, code=130)
    assert _files(tmp_path / "found") == {"config.json": b"old"}
    auto("--bpw", "4.2", "-o", "found", *mode)
    assert _files(tmp_path / "found") == {"config.json": b"new"} and not (tmp_path / "found.auto").exists()


def test_a_recipe_replaces_no_other_file(auto, made, tmp_path, monkeypatch):
    """Before the search, without --overwrite; what a stopped search wrote is its own."""
    asked, best = ["--bpw", "4.2", "-o", "found", "--recipe-out", "best.yaml"], tmp_path / "best.yaml"
    best.write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(run, "measure", None)  # nothing begins
        for mode in ([], ["--resume"]):
            said = auto(*asked, *mode, code=2)
            assert (
                "error: best.yaml exists\nhint: choose another --recipe-out, or replace it with --overwrite"
                in said
            )
        assert auto(*asked, "--dry-run")["refused"]["message"] == "best.yaml exists"
    assert best.read_text() == "mine" and not (tmp_path / "found.auto").exists()
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "publish", _stop)
        auto(*asked, "--overwrite", code=130)
    assert best.read_text() == "new recipe\n"
    best.write_text("edited")
    assert "best.yaml exists" in auto(*asked, "--resume", code=2)
    best.write_text("new recipe\n")
    auto(*asked, "--resume")
    assert best.read_text() == "new recipe\n" and (tmp_path / "found").is_dir()
    assert not (tmp_path / "found.auto").exists()


@pytest.mark.parametrize("mode", [[], ["--overwrite"]])
def test_a_recipe_on_a_full_disk(auto, made, tmp_path, monkeypatch, mode):
    """The error names the recipe; the file is the old one or the new one, and the search goes on."""
    asked, best = ["--bpw", "4.2", "-o", "found", "--recipe-out", "best.yaml", *mode], tmp_path / "best.yaml"
    if mode:
        best.write_text("mine")
    replace = os.replace

    def full(old, new):
        if Path(new).name == "best.yaml":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(old))
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        said = auto(*asked, code=5)
    assert "error: the disk of best.yaml is full\n" in said and "run the same command with --resume" in said
    assert best.read_text() == "mine" if mode else not best.exists()
    assert sorted(path.name for path in tmp_path.glob("*best*")) == ["best.yaml"] * len(mode)
    auto(*asked, "--resume")
    assert best.read_text() == "new recipe\n" and (tmp_path / "found").is_dir()
