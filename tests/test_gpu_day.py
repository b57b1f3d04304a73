"""scripts/gpu_day: a rehearsal of all stages, and stages that hang, die and are resumed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import accelerator
import psutil
import pytest
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))
import gpu_day  # noqa: E402
from common import random_model  # noqa: E402
from gpu import on_device, others, page  # noqa: E402
from gpu.run import Run, Skipped  # noqa: E402

# A stage's process: measures rows named in its summary; `hang` never ends, `dies` ends the process.
STAND_IN = """
import json, subprocess, sys, time
stage, request = sys.argv[1], json.load(open(sys.argv[2]))
path = request["results"] + f"/{stage}.json"
result = json.load(open(path))
def save():
    open(path, "w").write(json.dumps(result))
result["starts"] = result.get("starts", 0) + 1
for row in result["summary"].split():
    if row in result["rows"]:
        continue
    result["running"] = row
    save()
    if row == "hang":
        sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
        child = subprocess.Popen(sleep, start_new_session=True)
        open(request["results"] + "/child", "w").write(str(child.pid))
        time.sleep(60)
    if row == "dies":
        sys.exit(9)
    del result["running"]
    result["rows"][row] = {"error": "no"} if row == "wrong" else {"value": 1}
    save()
"""


@pytest.fixture
def day(tmp_path, monkeypatch):
    """`day({name: rows}, …)` runs stages of stand-ins: exit code, and results by name."""
    (tmp_path / "worker.py").write_text(STAND_IN)
    monkeypatch.setattr(gpu_day, "WORKER", tmp_path / "worker.py")
    monkeypatch.setattr(gpu_day, "page", SimpleNamespace(section=str))

    def run(stages: dict[str, str], *flags: str) -> tuple[int, dict]:
        found = tuple(
            gpu_day.Stage(name, 30 if "hang" not in rows else 1, rows) for name, rows in stages.items()
        )
        monkeypatch.setattr(gpu_day, "STAGES", found)
        monkeypatch.setattr(gpu_day, "LEAST", 0.5)
        code = gpu_day.main(["--device", "cpu", "--work", str(tmp_path / "work"), *flags])
        results = {
            path.stem: json.loads(path.read_text()) for path in (tmp_path / "work/results").glob("*.json")
        }
        return code, results

    return run


def test_a_stage_that_hangs_is_stopped_and_the_others_go_on(day, tmp_path):
    code, found = day({"first": "a hang b", "second": "c"})
    assert code == 1
    assert (found["first"]["state"], found["second"]["state"]) == ("stopped", "done")
    assert found["first"]["rows"] == {"a": {"value": 1}, "hang": {"error": "stopped at its time limit"}}
    child = int((tmp_path / "work/results/child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_process_that_dies_goes_on_behind_its_row(day):
    code, found = day({"first": "a dies b"})
    assert code == 1 and found["first"]["starts"] == 2
    assert found["first"]["rows"] == {
        "a": {"value": 1}, "dies": {"error": "its process ended with 9"}, "b": {"value": 1}
    }  # fmt: skip
    assert (found["first"]["state"], found["first"]["why"]) == ("failed", "rows with errors: dies")


def test_what_is_done_is_kept_and_what_failed_is_tried_again(day):
    _, before = day({"first": "a", "second": "b wrong"})
    assert before["second"]["state"] == "failed"
    code, found = day({"first": "a", "second": "b"})
    assert code == 0 and found["first"] == before["first"]
    assert found["second"]["rows"] == {"b": {"value": 1}}
    _, found = day({"first": "a c", "second": "b"}, "--only", "first")
    assert found["first"]["rows"] == {"a": {"value": 1}, "c": {"value": 1}}


def test_a_stage_without_time_waits(day):
    code, found = day({"first": "a"}, "--minutes", "0")
    assert code == 0
    assert (found["first"]["state"], found["first"]["why"]) == ("waits", "no time was left")


def test_what_is_missing_is_said_at_once():
    """By a Python without packages, and where torch finds no device."""
    done = subprocess.run(
        [sys.executable, "-S", ROOT / "scripts/gpu_day.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith("missing:\n  packages: torch>=")
    assert "pip install 'torch>=" in done.stderr


@pytest.mark.nightly
def test_a_device_that_is_not_there_is_said_at_once(capsys, tmp_path):
    assert gpu_day.main(["--device", "cuda:99", "--work", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("missing:\n  device cuda:99: ") and "\n  torch 2." in said


def test_weights_of_another_order_are_told_from_another_last_place(tmp_path):
    """What the tests of an accelerator go by on a real device."""
    one, other = tmp_path / "one", tmp_path / "other"
    random_model(one, 64, 64, 1, 1)
    shutil.copytree(one, other)
    path = other / "model-00001.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name] * 1.01
    save_file(tensors, path, {"format": "pt"})
    assert accelerator.far_apart(one, other) == []
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, path, {"format": "pt"})
    assert accelerator.far_apart(one, other) == [name]


def test_a_rehearsal_does_not_replace_what_a_gpu_measured(capsys):
    with pytest.raises(SystemExit):
        gpu_day.main(["--rehearse", "--write"])
    assert "add --page FILE" in capsys.readouterr().err


def test_a_page_of_a_device():
    rows = {"torch": {"device": "H100", "memory_bytes": 80e9, "torch": "2.13"}, "doctor": {"error": "a|b"}}
    about = {"stage": "device", "summary": "", "state": "done", "rows": rows}
    job = {"seconds": 2.5, "phases": {"solve": 1.25, "pack": 0.1}, "peak_bytes": 3e9, "versions": {"a": "1"}}
    other = {"seconds": 3, "phases": {"solve": 1.5}, "peak_bytes": 4e9}
    jobs = {"gptq": job, "rtn": other, "awq": {"error": "a|b"}}
    blocks = {"stage": "blocks", "summary": "", "state": "done", "rows": jobs}
    text = page.section([about, {}, blocks])
    assert text.startswith("Measured on one H100 (80 GB) with torch 2.13.") and page.NOTHING not in text
    assert "| row | seconds | solve s | pack s | peak bytes |" in text
    assert "| gptq | 2.5 | 1.25 | 0.1 | 3 GB |" in text and "| rtn | 3 | 1.5 | – | 4 GB |" in text
    assert "| awq | error: a\\|b |" in text and "Measured with a 1." in text
    assert "- doctor: error: a\\|b" in page.rows_of(rows | {"rates": {"flops_float32": 2e12}})
    assert page.section([]) == "Nothing was measured.\n"


def rehearsed(tmp_path: Path, code: int, *flags: str, start=gpu_day.started) -> dict[str, dict]:
    """Results by stage of a rehearsal, whose page must have a section of every stage with rows."""
    copy = tmp_path / "gpu.md"
    shutil.copy(ROOT / "docs/measurements/gpu.md", copy)
    asked = ["--rehearse", "--work", str(tmp_path / "day"), "--write", "--page", str(copy), *flags]
    assert gpu_day.main(asked, start) == code
    found = {}
    for stage in gpu_day.STAGES:
        found[stage.name] = json.loads((tmp_path / f"day/results/{stage.name}.json").read_text())
        if found[stage.name]["rows"]:
            assert f"### {stage.name.capitalize()}\n" in copy.read_text()
    assert page.NOTHING in copy.read_text()
    return found


@pytest.mark.nightly
def test_a_rehearsal_has_a_result_of_every_stage(tmp_path, monkeypatch):
    """A few rows of each, forked from this process; the start of processes and the clients are left out."""
    if accelerator.REAL:
        pytest.skip("a rehearsal runs on the double")
    monkeypatch.setattr(on_device, "METHODS", ["nf4"])
    monkeypatch.setattr(on_device, "JOBS", {"gptq": "gptq --transform none", "nf4": "nf4"})
    for stage in ("LARGE", "WHOLE"):
        monkeypatch.setattr(on_device, stage, ("nf4",))
    kept = ("GPTQModel gptq", "quantkit gptq unscaled")
    monkeypatch.setattr(others, "PEERS", {name: others.PEERS[name] for name in kept})
    monkeypatch.setattr(others, "decode", lambda run: {})
    found = rehearsed(tmp_path, 0, "--environments", str(tmp_path), start=gpu_day.forked)
    states = {name: result["state"] for name, result in found.items()}
    assert states == dict.fromkeys(states, "done") | dict.fromkeys(("vllm", "throughput", "ranks"), "skipped")
    assert found["vllm"]["why"].startswith("no .venv-vllm with vllm: scripts/clients-setup.sh vllm")
    assert found["ranks"]["why"] == "one device: two processes need two"
    for row in found["methods"]["rows"].values():
        assert row["other_weights"] == [] and row["kl_device"] == pytest.approx(row["kl_cpu"], rel=0.05)
    assert found["methods"]["rows"]["nf4"]["same_bytes"]
    for row in (found["blocks"]["rows"] | found["large"]["rows"]).values():
        assert row["launches"] > 0 < row["peak_bytes"] and row["planned_bytes"] > 0
    both = found["sweep"]["rows"]["both, 4 x 256"]
    assert (both["same_codes"], both["loss_ratio"]) == (1, pytest.approx(1))
    (tested,) = found["tests"]["rows"].values()
    assert (tested["failed"], tested["passed"], tested["left_out"]) == ([], 1, 0)
    assert found["peers"]["rows"]["GPTQModel gptq"]["skipped"].startswith("no .venv-clients")
    assert found["peers"]["rows"]["quantkit gptq unscaled"]["phases"].keys() == {"load", "quantize", "save"}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_whole_rehearsal(tmp_path):
    """Every row, each stage in a process of its own, clients where they are, and two ranks."""
    flags = ("--ranks", "2", "--minutes", "30", "--patience", "4")
    found = rehearsed(tmp_path, 0, *flags)
    assert found["ranks"]["rows"].keys() == {"1", "2"}
    assert found["blocks"]["rows"].keys() == {f"{name}, Llama-3-8B" for name in on_device.JOBS}
    assert not [row for result in found.values() for row in result["rows"].values() if "error" in row]


def test_a_row_of_an_error_is_kept_and_the_next_goes_on(tmp_path):
    (tmp_path / "device.json").write_text('{"rows": {"old": {"value": 1}}}')
    run = Run("device", "cpu", True, tmp_path, tmp_path, tmp_path, 0)
    run.result = json.loads(run.path.read_text())

    def refuse():
        raise Skipped("nothing here")

    run.row("old", refuse)
    run.row("wrong", lambda: 1 / 0)
    run.row("skipped", refuse)
    run.row("next", lambda: {"pid": os.getpid()})
    rows = json.loads(run.path.read_text())["rows"]
    assert rows["old"] == {"value": 1} and rows["next"]["pid"] == os.getpid()
    assert rows["wrong"]["error"] == "ZeroDivisionError: division by zero"
    assert rows["skipped"]["skipped"] == "nothing here"
