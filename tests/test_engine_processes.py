"""The processes of `--engine`: what they print besides their answer, how they fail, and that they end."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import jobs
import pytest
import torch

from quantkit.evaluation.engines import PACKAGES, Engine

FACTS = '{"version": "1", "kernels": null, "dtype": null, "vocabulary": 4096}'
NAN = r"exec tr '\0' '\377' </dev/zero"
LOOKED = '#!/bin/sh\ntest "$1" = -c && exit\n'  # yes, it has the package


def test_a_relative_python_is_found_from_any_folder(program, tmp_path, monkeypatch):
    """The engine runs in another folder, where `--python .venv/bin/python` named nothing."""
    path = program("#!/bin/sh\n")
    monkeypatch.chdir(tmp_path)
    assert Engine.find("transformers", "./python", []).python == str(path)


@pytest.mark.parametrize(
    "engine", [name for name, (package, _) in PACKAGES.items() if not find_spec(package)]
)
def test_a_missing_package_is_named_with_the_command(demo_model, refuse, tmp_path, monkeypatch, engine):
    """A folder of that name in the current folder is not the package."""
    (tmp_path / PACKAGES[engine][0]).mkdir()
    monkeypatch.chdir(tmp_path)
    error, hint = refuse(4, "verify", demo_model, "--engine", engine)
    package, install = PACKAGES[engine]
    install += "-cpu" if engine == "vllm" and not torch.cuda.is_available() else ""
    assert error == f"{sys.executable} has no package {package}, which runs {engine}"
    assert hint == f"{sys.executable} -m pip install {install}; or name a python that has it with --python"


@pytest.mark.parametrize(
    "reason", ["ValueError: no kernel for int4", "what(): not implemented", "Value error, too long"]
)
def test_what_an_engine_says_when_it_declines_is_the_error(demo_model, refuse, program, reason):
    """The second is an abort in C++, after a warning that shows another error; the third is pydantic's."""
    lines = f"echo 'KeyError: only a warning' >&2\necho '{reason}' >&2\necho 'frame #1: torch' >&2"
    python = program(f'#!/bin/sh\ntest "$1" = -c && exit\n{lines}\nexit 1\n')
    error, hint = refuse(4, "verify", demo_model, "--engine", "vllm", "--python", python)
    assert error == f"vllm does not run {demo_model}: {reason}"
    assert hint.startswith(f"quantkit inspect {demo_model} lists engines")


def test_an_engine_that_ends_early_is_no_result(demo_model, refuse, program):
    facts = '{"version": "1", "kernels": null, "dtype": null, "vocabulary": 4096}'
    python = program(f"#!/bin/sh\ntest \"$1\" = -c && exit\necho '{facts}'\necho RuntimeError: full >&2\n")
    error, _ = refuse(1, "eval", demo_model, "--limit", 512, "--engine", "mlx", "--python", python)
    assert error == f"mlx ended while it ran {demo_model}: RuntimeError: full"


def test_all_lines_of_an_error_are_shown(demo_model, refuse, program):
    """vLLM lists what each of its kernels lacks; pydantic quotes its input."""
    said = r"(Worker pid=7) ValueError: no kernel. Reasons: \n Marlin: no GPU\n Exllama: bias\n[rank0]: x\n"
    python = program(f"{LOOKED}printf '{said}' >&2\nexit 1\n")
    error, _ = refuse(4, "verify", demo_model, "--engine", "vllm", "--python", python)
    whole = "ValueError: no kernel. Reasons: Marlin: no GPU Exllama: bias"
    assert error == f"vllm does not run {demo_model}: {whole}"


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ("echo '[1, 2]'", 4, "mlx does not run {}: it printed: [1, 2]"),
        ("""echo '{"version": "1"}'""", 4, 'mlx does not run {}: it printed: {{"version": "1"}}'),
        ("exec yes", 4, "mlx does not run {}: it answers with something else than {}"),
        ("exec cat /dev/zero", 4, "mlx does not run {}: it answers with something else than {}"),
        (f"echo '{FACTS[:-5]}7}}'", 4, "mlx does not run {}: it computes 7 logits a token, not 4096"),
        ("echo x >&2; kill -9 $$", 1, "mlx does not run {}: the system killed it, as when memory runs out"),
        (f"echo '{FACTS}'; {NAN}", 6, "mlx computes probabilities of {} that are not finite numbers"),
    ],
    ids=["a list", "keys missing", "too many lines", "no line", "another vocabulary", "killed", "NaN"],
)
def test_an_answer_that_is_none_is_an_error(demo_model, refuse, program, monkeypatch, answer, code, said):
    monkeypatch.setattr("quantkit.evaluation.engines.GRACE", 0.5)
    python = program(f"{LOOKED}{answer}\n")
    error, _ = refuse(code, "verify", demo_model, "--engine", "mlx", "--python", python)
    assert error == said.format(demo_model, "quantkit's program")


def test_a_model_that_the_engine_declines_keeps_the_rows_of_the_others(
    short_demo, quantkit, program, tmp_path
):
    """The Python of the engine prints a banner before its answer."""
    for name in ("bad", "good"):
        jobs.quantize("nf4", short_demo, tmp_path / name)
    refusing = "cat >asked\ngrep -q /bad asked && echo 'ValueError: no' >&2 && exit 1\ncd /\n"
    banner = f"echo 'Loading cuda/12'\nexec {sys.executable} \"$@\" <{tmp_path}/asked\n"
    python = program(f"{LOOKED}cd {tmp_path}\n{refusing}{banner}")
    command = ["eval", short_demo, "bad", "good", "--ctx", 64, "--limit", 256, "--engine", "transformers"]
    command += ["--python", python]
    done = quantkit(*command, "--json", "-q")
    made = json.loads(done.out)
    served = [model["source"] for model in made["models"] if model["engine"]]
    assert served == [f"{short_demo} in transformers", "good in transformers"]
    said = "transformers does not run bad: ValueError: no"
    assert made["engine_declined"]["bad"]["message"] == said
    assert (done.code, made["error"]["message"], made["error"]["exit_code"]) == (4, said, 4)
    shown = quantkit(*command, "-q")
    assert shown.code == 4 and f"bad was not measured in the engine: {said}\n" in shown.out
    assert f"error: {said}\n" in shown.err


def ended(path: Path) -> bool:
    """Whether the process whose id stands in the file has ended."""
    state = Path(f"/proc/{path.read_text().strip()}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    return not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_workers_of_an_engine_end_with_it(demo_model, refuse, program, tmp_path):
    """They hold its pipe open."""
    python = program(f"{LOOKED}sleep 300 &\necho $! >{tmp_path}/pid\nexit 3\n")
    error, _ = refuse(4, "verify", demo_model, "--engine", "mlx", "--python", python)
    assert error == f"mlx does not run {demo_model}: its exit code is 3"
    assert ended(tmp_path / "pid")


HEARING = (  # SIGINT, though these tests may run in the background
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from quantkit.__main__ import main; main()"
)


STRUCK = (  # by a signal when the engine's process is there and nobody holds it yet
    "import os, subprocess, time; from quantkit.__main__ import main; init = subprocess.Popen.__init__\n"
    "def struck(self, command, *more, **options):\n"
    "    init(self, command, *more, **options)\n"
    "    while 'in_mlx' in command and not os.path.exists({pid!r}): time.sleep(0.05)\n"
    "    if 'in_mlx' in command: os.kill(os.getpid(), {number})\n"
    "subprocess.Popen.__init__ = struck; "
)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_an_engine_starts_ends_it(demo_model, program, tmp_path, number, code):
    python, pid = program(f"{LOOKED}echo $$ >{tmp_path}/pid\nexec sleep 300\n"), tmp_path / "pid"
    command = ["verify", demo_model, "--engine", "mlx", "--python", python, "-q"]
    struck = STRUCK.format(pid=str(pid), number=int(number))
    command = [sys.executable, "-c", struck + HEARING, *map(str, command)]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == code and ended(pid), done.stderr


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_an_engine_that_hangs_and_its_workers(demo_model, program, tmp_path, number, code):
    python, pid = program(f"{LOOKED}sleep 300 &\necho $! >{tmp_path}/pid\nwait\n"), tmp_path / "pid"
    command = ["verify", demo_model, "--engine", "mlx", "--python", python, "-q"]
    command = [sys.executable, "-c", HEARING, *map(str, command)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not (pid.exists() and pid.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        os.kill(process.pid, number)
        assert "Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode == code and ended(pid)
