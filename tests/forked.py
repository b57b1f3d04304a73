"""Command lines in processes forked from one that has imported everything: a start costs milliseconds, and a
kill is a real one.

The server is a Python of its own with one thread, for a fork of a process whose libraries run threads may
hang. It only ever imports: what a command needs, it learns from a run of it (`Server.learn`). Requests and
answers are lines of JSON on its stdin and stdout; it ends, with all that runs, when its stdin does.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "RAYON", "VECLIB", "NUMEXPR")}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TORCHDYNAMO_DISABLE": "1"}
KNOWN = ("quantkit.cli", "quantkit.cli.job_report", "quantkit.quantize.loop", "quantkit.evaluation.runs")
KNOWN += ("transformers.models.llama.modeling_llama",)  # imported at once; more is learnt
PATIENCE = 300  # seconds for a job of less than one


class Server:
    """`Server().run(folder, ["nf4", "model"])` -> the exit code; negative: the signal that ended it."""

    def __init__(self, **environment: str):
        path = os.pathsep.join(
            [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self._process = subprocess.Popen(
            [sys.executable, "-B", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | OFFLINE | ONE_THREAD | {"PYTHONPATH": path} | environment,
        )
        self._rest = b""
        self._codes: dict[int, int] = {}

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def learn(self, folder: Path, arguments: list) -> int:
        """Run a command, and import what it has imported for those that follow."""
        code = self.run(folder, arguments, modules=str(folder / "modules"))
        names = (folder / "modules").read_text().split()
        (folder / "modules").unlink()
        self._ask(imports=names)
        self._answer("imported")
        return code

    def start(self, folder: Path, arguments: list, **more: Any) -> Job:
        """A command in `folder`, its output in the file `log_of(folder)`.

        stop: (`module:Kind.function`, the n-th call, a signal) - which it sends itself just before that call,
        and says so in `folder/reached`. after: calls count from just before another call, (function, n-th).
        call: (`module:function`, arguments) before it begins. environment: added. modules: where
        to say what was imported.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._ask(folder=str(folder), arguments=[*map(str, arguments)], **more)
        return Job(self, self._answer("pid")["pid"])

    def run(self, folder: Path, arguments: list, **more: Any) -> int:
        code = self.start(folder, arguments, **more).wait(PATIENCE)
        assert code is not None, f"goes on for {PATIENCE} s"
        return code

    def send(self, pid: int, number: int) -> None:
        """A signal, if the process is still there; the server knows."""
        self._ask(pid=pid, signal=int(number))

    def ended(self, pid: int, seconds: float) -> int | None:
        """The exit code, if it ends by then."""
        until = time.monotonic() + seconds
        while pid not in self._codes and (left := until - time.monotonic()) > 0:
            self._hear(left)
        self._hear(0)
        return self._codes.get(pid)

    def _ask(self, **request: Any) -> None:
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self, key: str) -> dict:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for found in self._hear(1):
                if key in found:
                    return found
        raise AssertionError(f"the server says nothing for {PATIENCE} s")

    def _hear(self, seconds: float) -> list[dict]:
        """What the server says within that time; codes are kept."""
        stream = self._process.stdout
        if not select.select([stream], [], [], seconds)[0]:
            return []
        data = os.read(stream.fileno(), 1 << 16)
        assert data, "the server has ended"
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = [json.loads(line) for line in lines]
        self._codes |= {one["ended"]: one["code"] for one in found if "ended" in one}
        return [one for one in found if "ended" not in one]


def log_of(folder: Path) -> Path:
    """Beside it, so that a folder that takes no more still lets a command speak."""
    return folder.with_name(f"{folder.name}-log")


def said(folder: Path) -> str:
    """What the last command there said."""
    return log_of(folder).read_text(errors="replace")


class Job:
    """A process that was started."""

    def __init__(self, server: Server, pid: int):
        self.server, self.pid = server, pid

    def wait(self, seconds: float) -> int | None:
        """The exit code, or None if it still runs then."""
        return self.server.ended(self.pid, seconds)

    def send(self, number: int) -> None:
        self.server.send(self.pid, number)


# ---- the server


def serve() -> dict | None:
    """Answer requests until there are no more: None. In each fork: what is asked of it."""
    wakes, woken = os.pipe()
    for end in (wakes, woken):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    running: set[int] = set()
    rest = b""
    while True:
        ready = select.select([0, wakes], [], [])[0]
        if wakes in ready:
            os.read(wakes, 1 << 12)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                say(ended=pid, code=os.waitstatus_to_exitcode(status))
        if 0 not in ready:
            continue
        data = os.read(0, 1 << 20)
        if not data:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return None
        *lines, rest = (rest + data).split(b"\n")
        for request in map(json.loads, lines):
            if "imports" in request:
                learn(request["imports"])
                say(imported=True)
            elif "signal" in request:
                if request["pid"] in running:
                    os.kill(request["pid"], request["signal"])
            else:
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(wakes), os.close(woken)
                    return request
                running.add(pid)
                say(pid=pid)


def say(**answer: Any) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def learn(names: Iterable[str]) -> None:
    """Import what is there, make the table that transformers makes once, and let forks share it."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
    gc.freeze()


def named(place: str) -> tuple[Any, str]:
    """(whose it is, its name) of `module:Kind.function`."""
    module, _, path = place.partition(":")
    whose = importlib.import_module(module)
    *kinds, name = path.split(".")
    for kind in kinds:
        whose = getattr(whose, kind)
    return whose, name


def before(place: str, call: int, do: Callable[[], None]) -> None:
    """`do` something just before the `call`-th call of a function; 0: before every call."""
    whose, name = named(place)
    whole, calls = getattr(whose, name), []

    def replaced(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if call in (0, len(calls)):
            do()
        return whole(*arguments, **options)

    setattr(whose, name, replaced)


def stop_at(place: str, call: int, number: int) -> None:
    """The process sends itself a signal just before the `call`-th call of a function."""

    def stop() -> None:
        Path("reached").touch()
        os.kill(os.getpid(), number)

    before(place, call, stop)


def become(request: dict) -> None:
    """The console script, in a fork."""
    os.chdir(request["folder"])
    log = os.open(log_of(Path.cwd()), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for theirs, ours in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(theirs, ours)
    os.close(nothing), os.close(log)
    from quantkit import __main__ as script

    signal.signal(signal.SIGINT, script._end)  # as the script answers before it has a command
    sys.argv = ["quantkit", *request["arguments"]]
    os.environ |= request.get("environment", {})
    if "call" in request:
        place, arguments = request["call"]
        whose, name = named(place)
        getattr(whose, name)(*arguments)
    if "stop" in request and "after" in request:
        before(*request["after"], lambda: stop_at(*request["stop"]))
    elif "stop" in request:
        stop_at(*request["stop"])
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else the script takes it for ignored
        script.main()
    except KeyboardInterrupt:  # between these two
        script._end()
    except SystemExit as ended:
        if "modules" in request:
            imported = (name for name, module in sys.modules.items() if getattr(module, "__file__", None))
            Path(request["modules"]).write_text("\n".join(imported))
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(ended.code or 0)  # else the interpreter takes apart, page by page, what it shares


if __name__ == "__main__":
    learn(KNOWN)
    asked = serve()
    if asked is not None:
        become(asked)
