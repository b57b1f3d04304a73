"""Every program in scripts/ starts: Python ones print their help, shell ones run with stand-ins for what they
install."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = sorted(  # programs; they import the other files
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "scripts").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
SHELL = sorted(
    path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and path.suffix in ("", ".sh")
)
# One process starts them all, because importing torch takes longer than everything else here.
START_ALL = """
import contextlib, io, json, os, runpy, sys
path, found = list(sys.path), {}
for script in sys.argv[1:]:
    sys.argv, sys.path[:] = [script, "--help"], [os.path.dirname(script), *path]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
        error = None
    except SystemExit as end:
        error = f"exit code {end.code}" if end.code else None
    except Exception as wrong:
        error = f"{type(wrong).__name__}: {wrong}"
    found[script] = error, printed.getvalue()
print(json.dumps(found))
"""
# Stands in for python, pip and what they install: writes down how it was called.
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
if [ "$1" = eval ]; then printf "%s" "$PRINTED"; fi
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p "$3/bin"
    for name in python quantkit ruff; do cp "$0" "$3/bin/$name"; done
fi
"""


@pytest.fixture(scope="module")
def started():
    """script -> (error, what it printed)."""
    scripts = [str(ROOT / script) for script in PYTHON]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", START_ALL, *scripts]
    done = subprocess.run(command, env=env, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", PYTHON)
def test_a_python_script_starts(started, script):
    error, printed = started[str(ROOT / script)]
    for package in ("xllamacpp", "triton"):
        if error == f"ModuleNotFoundError: No module named '{package}'":
            pytest.skip(f"needs {package}")
    assert error is None
    assert printed.startswith("usage: ")


@pytest.fixture
def shell(tmp_path):
    """`shell(script, ...)`: its exit code, what it printed, and the calls of what stands in for python."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    for name in ("pyproject.toml", "constraints.txt", "constraints-clients.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    stand_in, calls = tmp_path / "python-stand-in", tmp_path / "calls"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)

    def run(*command):
        env = os.environ | {"PYTHON": str(stand_in), "CALLS": str(calls)}
        env.pop("QUANTKIT_SKIP_CLIENTS", None)
        done = subprocess.run(["bash", *command], cwd=tmp_path, env=env, text=True, capture_output=True)
        return done.returncode, done.stdout + done.stderr, calls.read_text() if calls.exists() else ""

    return run


@pytest.mark.parametrize("name", SHELL)
def test_a_shell_script_has_no_syntax_error(name):
    subprocess.run(["bash", "-n", ROOT / "scripts" / name], check=True)


def test_the_demo_compresses_and_compares(shell):
    code, _, calls = shell("scripts/demo")
    assert code == 0
    commands = [line.split()[1] for line in calls.splitlines() if line.startswith("quantkit ")]
    assert commands == ["gptq", "gptq", "eval"]


@pytest.mark.parametrize("lacking", [None, "rtn-w4g128"])
def test_ci_runs_both_commands_and_wants_every_row_of_the_demo(shell, tmp_path, monkeypatch, lacking):
    """With a browser that is there, so that nothing is installed."""
    (tmp_path / ".ci").symlink_to(ROOT / ".ci")
    (tmp_path / "chromium").write_text("")
    (tmp_path / "chromium").chmod(0o755)
    rows = [name for name in ("demo-llama-6m", "gptq-w4g128", "rtn-w4g128") if name != lacking]
    table = "".join(f" {name:20} 11.54 MB   52.186\n" for name in rows)
    monkeypatch.setenv("PRINTED", table)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code, printed, calls = shell(".ci/run")
    assert (code == 0, "no row rtn-w4g128" in printed) == (lacking is None, lacking is not None)
    assert ("-m pytest" in calls) == (lacking is None)
