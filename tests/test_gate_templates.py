"""The gate for other people's CI: the action's and the template's own shell steps, run on a tiny model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gate_runs
import pytest
import yaml
from nights import nightly
from test_docs import ROOT

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
JOB = yaml.safe_load((ROOT / "templates" / "quantkit-gate.yml").read_text())[".quantkit-gate"]
STEPS = ["actions/setup-python@v5", "Install quantkit", "Quantize", "Measure", "Upload the report"]
EVAL = "--ctx 32 --limit 512"
PULL = {"repository": "org/name", "event_name": "pull_request", "token": "secret"}
PULL["event"] = {"pull_request": {"number": 7}}


def start(folder: Path, **programs) -> gate_runs.Shell:
    """Bash with stand-ins for programs. The Python of a new environment only reads results."""

    def python(words):
        if words[:2] == ["-m", "venv"]:
            place = Path(words[2], "bin")
            place.mkdir(parents=True, exist_ok=True)
            (place / "python").write_text(
                f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -I "$@"\nexec {folder}/bin/pip "$@"\n'
            )
            (place / "python").chmod(0o755)
            (place / "quantkit").unlink(missing_ok=True)
            (place / "quantkit").symlink_to(folder / "bin" / "quantkit")
        return 0, "", ""

    quiet = {name: lambda words: (0, "", "") for name in ("pip", "gh", "curl")}
    return gate_runs.Shell(folder, quiet | {"python": python} | programs)


@pytest.fixture
def shell(quantkit, tmp_path):
    """With the real `quantkit`, and a `gh` that remembers its comment."""
    comments = []

    def gh(words):
        if "--paginate" in words:
            return 0, "".join(f"{number}\n" for number in comments), ""
        comments[:] = comments or [12]
        return 0, "", ""

    return start(tmp_path, gh=gh, quantkit=lambda words: tuple(quantkit(*words)))


@pytest.fixture
def source(tiny_model):
    return str(tiny_model("llama", tokenizer=True, name="tiny", num_hidden_layers=1))


def sent(shell: gate_runs.Shell) -> list[list[str]]:
    """Calls of gh that change a comment."""
    return [call for call in shell.calls if call[0] == "gh" and "--method" in call]


def test_the_action_passes_then_fails_and_comments_one_table(shell, source):
    """The second run takes the finished output, and replaces the comment of the first."""
    inputs = {"model": source, "method": "nf4", "eval-options": EVAL, "max-kld": "0.5"}
    action = gate_runs.Action(ACTION, shell, PULL, ROOT)
    assert action.run(inputs) == 0, action.log
    assert action.ran == [*STEPS, "Comment the table"]
    assert ["pip", "-m", "pip", "install", "--quiet", str(ROOT)] in shell.calls
    outputs = action.outputs()
    report = Path(outputs["report"])
    record = json.loads((report / "result.json").read_text())
    kld = record["models"][1]["metrics"]["kld"]["mean"]
    assert outputs["passed"] == "true" and 0 < float(outputs["kld"]) == kld < 0.5
    assert (record["data"]["text"], record["data"]["ctx"]) == ("shipped held-out text", 32)
    assert action.uses["actions/upload-artifact@v4"] == {"name": "quantkit-report", "path": str(report)}
    assert {path.name for path in report.iterdir()} == {
        "result.json", "report.html", "table.md", "comment.md"
    }  # fmt: skip
    table = (report / "table.md").read_text()
    assert action.summary == table and table.startswith("### quantkit eval: all gates passed\n")
    row = re.search(r"^\| model-quantized \|.*$", table, re.MULTILINE)[0]
    assert f" {kld:.5f} " in row
    assert (report / "comment.md").read_text() == f"<!-- quantkit gate: quantkit-report -->\n{table}"
    body = ["--field", f"body=@{report}/comment.md", "--silent"]
    assert sent(shell) == [["gh", "api", "--method", "POST", "repos/org/name/issues/7/comments", *body]]

    again = gate_runs.Action(ACTION, shell, PULL, ROOT)
    assert again.run(inputs | {"max-kld": "0.0000001"}) == 7
    assert again.ran == [*STEPS, "Comment the table", "Gate"]
    assert again.outputs()["passed"] == "false" and float(again.outputs()["kld"]) == kld
    failed = Path(again.outputs()["report"])
    assert (failed / "report.html").exists() and "1 of 1 gates failed" in (failed / "comment.md").read_text()
    assert sent(shell)[1][2:5] == ["--method", "PATCH", "repos/org/name/issues/comments/12"]
    assert f"::error title=quantkit::a gate failed: KL divergence {kld}, limit 0.0000001" in again.log


def test_the_action_ends_at_an_error_and_comments_only_on_pull_requests(shell, source):
    push = PULL | {"event_name": "push", "event": {}}
    action = gate_runs.Action(ACTION, shell, push, ROOT)
    inputs = {"model": source, "method": "nf4", "eval-options": EVAL}
    assert action.run(inputs | {"eval-options": "--ctx none"}) == 2
    assert action.ran == STEPS[:4] and "error: " in action.log
    action = gate_runs.Action(ACTION, shell, push, ROOT)
    assert action.run(inputs) == 0 and action.ran == STEPS and not sent(shell)


def test_the_action_reports_what_an_engine_computes(shell, source):
    """Not the noise of the original there; the report is kept if the engine does not run the model."""
    inputs = {"model": source, "method": "nf4", "max-kld": "0.5"}
    action = gate_runs.Action(ACTION, shell, PULL, ROOT)
    assert action.run(inputs | {"eval-options": f"{EVAL} --engine transformers"}) == 0, action.log
    record = json.loads(Path(action.outputs()["report"], "result.json").read_text())
    losses = [model["metrics"]["kld"]["mean"] for model in record["models"][2:]]
    assert len(losses) == 2 and float(action.outputs()["kld"]) == max(losses)

    pytest.importorskip("xllamacpp")
    action = gate_runs.Action(ACTION, shell, PULL, ROOT)
    assert action.run(inputs | {"eval-options": f"{EVAL} --engine llama.cpp"}) == 4
    assert action.ran == [*STEPS, "Comment the table", "Gate"] and "not everything was measured" in action.log
    said = "### quantkit eval: all gates passed, the engine did not run 1 model\n"
    assert said in action.summary and float(action.outputs()["kld"]) == losses[0]


def test_the_gitlab_job_passes_then_fails_and_keeps_its_report(shell, source):
    variables = {"QUANTKIT_MODEL": source, "QUANTKIT_METHOD": "nf4", "QUANTKIT_EVAL_OPTIONS": EVAL}
    variables |= {"QUANTKIT_SOURCE": "git+https://host/quantkit", "QUANTKIT_MAX_KLD": "0.5"}
    code, log = gate_runs.gitlab(JOB, shell, variables)
    assert code == 0, log
    assert ["python", "-m", "pip", "install", "--quiet", "git+https://host/quantkit"] in shell.calls
    report = shell.folder / "quantkit-report"
    assert JOB["artifacts"] == {
        "when": "always", "expose_as": "quantkit report", "paths": ["quantkit-report/"]
    }  # fmt: skip
    passed = (report / "table.md").read_text()
    assert passed in log and passed.startswith("### quantkit eval: all gates passed\n")
    merge = {"CI_API_V4_URL": "https://host/api/v4", "CI_PROJECT_ID": "3", "CI_MERGE_REQUEST_IID": "7"}
    merge |= {"QUANTKIT_TOKEN": "secret", "QUANTKIT_MAX_KLD": "0.0000001"}
    code, log = gate_runs.gitlab(JOB, shell, variables | merge)
    assert code == 7 and "secret" not in log
    assert (report / "table.md").read_text().startswith("### quantkit eval: 1 of 1 gates failed\n")
    assert {path.name for path in report.iterdir()} == {"result.json", "report.html", "table.md"}
    (note,) = (call for call in shell.calls if call[0] == "curl")
    assert note[-1] == "https://host/api/v4/projects/3/merge_requests/7/notes"
    assert "body@quantkit-report/table.md" in note


HOSTILE = ['"; touch owned; "', "a\ntouch owned"]
HOSTILE += nightly("$(touch owned)", "`touch owned`", "'; touch owned; '")


@pytest.mark.parametrize("text", HOSTILE)
def test_no_input_is_run_as_shell(tmp_path, text):
    """Every input reaches quantkit as it is, or in words where it is split."""
    record = json.dumps({"gates": [{"metric": "kld.mean", "value": 0.1}]})

    def quantkit(words):
        for word in words:
            if word.startswith("--summary="):
                Path(tmp_path, word.partition("=")[2]).touch()
        return 0, record, ""

    shell = start(tmp_path, quantkit=quantkit)
    action = gate_runs.Action(ACTION, shell, PULL, ROOT)
    inputs = {name: text for name in ACTION["inputs"] if name != "comment"}
    assert action.run(inputs) == 0, action.log
    split = text.split()
    eval_call = next(call for call in shell.calls if call[:2] == ["quantkit", "eval"])
    assert shell.calls[-1][0] == "gh" and ["quantkit", text, f"--output={text}", "--resume", "--quiet"] + [
        *split, "--", text
    ] in shell.calls  # fmt: skip
    assert eval_call[2 : 4 + len(split)] == [f"--max-kld={text}", f"--text={text}", *split]
    assert eval_call[-2:] == [text, text]
    hostile = {name: text for name in JOB["variables"]} | {"QUANTKIT_TOKEN": text}
    code, log = gate_runs.gitlab(JOB, shell, hostile | {"CI_MERGE_REQUEST_IID": text})
    assert code == 0, log
    assert shell.calls[-1][0] == "curl" and f"PRIVATE-TOKEN: {text}" in shell.calls[-1]
    assert not (tmp_path / "owned").exists()


def test_no_step_contains_an_expression():
    """Which the service would paste into the script."""
    scripts = [step["run"] for step in ACTION["runs"]["steps"] if "run" in step]
    assert len(scripts) == 5 and not [script for script in scripts if "${{" in script]
    assert all("$[[" not in line for line in JOB["script"])
    for script in [*scripts, "\n".join(JOB["script"])]:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_page_runs_before_a_release(quantkit, source, tmp_path):
    """Its commands up to those that need an engine or the hub."""
    page = (ROOT / "docs" / "howto" / "ci-gate.md").read_text()
    block = re.search(r"^## Before a release\n.*?^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    lines = [line.partition("#")[0].split() for line in block.splitlines()]
    assert [line[1] for line in lines] == ["verify", "inspect", "eval", "serve", "push"]
    quantkit("nf4", source, "-o", "model-w4", "-q")
    (tmp_path / "model").symlink_to(source)
    (tmp_path / "test.txt").write_text((ROOT / "heldout" / "heldout.txt").read_text()[:4000])
    for line in lines[:3]:
        done = quantkit(*line[1:], *(["--ctx", "32"] if line[1] == "eval" else []))
        assert done.code == 0, done
    assert "KL divergence" in (tmp_path / "model-w4" / "README.md").read_text()


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # it downloads torch
def test_the_action_installs_itself(source, tmp_path):
    """Nothing but `gh` is a stand-in."""
    pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    shell = gate_runs.Shell(tmp_path, {"gh": lambda words: (0, "", "")}, pip)
    action = gate_runs.Action(ACTION, shell, PULL, ROOT)
    action.python = sys.executable
    inputs = {"model": source, "method": "nf4", "eval-options": EVAL, "max-kld": "0.0000001"}
    assert action.run(inputs | {"extra-index-url": ""}) == 7, action.log
    assert action.ran[-1] == "Gate" and sent(shell)
    assert (tmp_path / "temp" / "quantkit" / "bin" / "quantkit").exists()
