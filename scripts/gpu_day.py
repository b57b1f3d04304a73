"""Measure everything that needs a GPU, in stages ordered by worth, without a network.

    scripts/gpu_day                      # on a machine with a GPU: about 40 minutes
    scripts/gpu_day --minutes 15         # the first stages, as many as there is time for
    scripts/gpu_day --only sweep tests   # some stages, again even if they are done
    scripts/gpu_day --rehearse           # all stages on the CPU, on tiny models
    scripts/gpu_day --no-run --write     # what was measured becomes a section of docs/measurements/gpu.md

Each stage is a process with a time limit; every row it measured is in WORK/results/STAGE.json at once. A
stage that hangs or dies is stopped with all its processes, and the others go on. The same command again goes
on with what is missing: finished stages, and rows of unfinished ones, are kept. Exit code 1: a stage failed
or was stopped; 2: something is missing without which nothing runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, write_section
from gpu import page, worker
from gpu.run import write

WORKER = ROOT / "scripts/gpu/worker.py"
LEAST = 15  # seconds below which no stage is begun
GRACE = 5  # seconds between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Stage:
    """seconds: its time limit."""

    name: str
    seconds: float
    summary: str


STAGES = (
    Stage("device", 60, "doctor; launches, copies, products and factors a second"),
    Stage(
        "whole", 600, "jobs on all of a model of Llama-3-8B's shapes, then its loss: time, memory, the plan"
    ),
    Stage("tests", 240, "the tests of an accelerator on the real device"),
    Stage("large", 300, "jobs on one block of a 70B model and of a mixture"),
    Stage(
        "peers",
        360,
        "llm-compressor and GPTQModel on two blocks of the 8B model, the former on all",
    ),
    Stage("methods", 180, "every method on the bundled model, against the CPU's result"),
    Stage("blocks", 300, "jobs on two blocks of the 8B model: seconds by phase, memory against the plan"),
    Stage("vllm", 420, "vLLM with its kernels on what was written: KL divergences"),
    Stage("throughput", 420, "tokens a second in vLLM, 1, 8 and 64 sequences at once"),
    Stage("sweep", 120, "GPTQ with and without its graphs and its kernel"),
    Stage("bench", 240, "attention, batching, decoding, speculative decoding"),
    Stage("ranks", 150, "two processes on two devices against one"),
)


# What is there


def missing() -> list[str]:
    """Return a line for everything without which no stage runs; torch is not imported."""
    import tomllib
    from importlib import metadata

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    absent = []
    for requirement in wanted:
        try:
            metadata.version(re.match(r"[\w.-]+", requirement)[0])
        except metadata.PackageNotFoundError:
            absent.append(requirement)
    if not absent:
        return []
    quoted = " ".join(f"'{requirement}'" for requirement in absent)
    return [f"packages: {', '.join(absent)}", f"install them: {sys.executable} -m pip install {quoted}"]


def no_device(device: str) -> list[str]:
    """Return why nothing computes on `device`, in lines. Another process asks: this one uses no device."""
    if device == "cpu":
        return []
    asked = "import sys, torch; print(torch.__version__); torch.empty(1, device=sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", asked, device], capture_output=True, text=True)
    if not done.returncode:
        return []
    reason, version = done.stderr.strip().splitlines()[-1], done.stdout.strip() or "–"
    lines = [f"device {device}: {reason}", f"torch {version}"]
    if "+cpu" in done.stdout:
        lines.append("this torch is built without CUDA; install one with it")
    return [*lines, "to rehearse on the CPU: --rehearse"]


# Stages


def read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def started(stage: str, request: Path, log: Path) -> int:
    """Start a stage's process as leader of a group of its own; return its id."""
    with log.open("ab") as said:
        command = [sys.executable, str(WORKER), stage, str(request)]
        return subprocess.Popen(
            command, stdout=said, stderr=said, cwd=request.parent, start_new_session=True
        ).pid


def forked(stage: str, request: Path, log: Path) -> int:
    """The same, forked from this process, which has imported everything: for rehearsals on the CPU."""
    if pid := os.fork():
        return pid
    code = 70
    try:
        os.setsid()
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(said, number)
        os.chdir(request.parent)
        code = worker.main([stage, str(request)])
    finally:
        os._exit(code)


def ended(pid: int, until: float) -> int | None:
    """Wait for a child's exit code, negative for a signal; None if it is not done at `until`."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            return None
        time.sleep(0.02)


def stop(pid: int) -> None:
    """End a child and everything it started, also what left its group."""
    import psutil

    left = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for number, wait in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        for process in left:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                pass
        _, left = psutil.wait_procs(left, wait)


class Day:
    """The stages of one call. start: `started` or `forked`."""

    def __init__(self, args: argparse.Namespace, start=started):
        self.args, self.start = args, start
        self.until = time.monotonic() + 60 * args.minutes
        self.results, self.logs = args.results or args.work / "results", args.work / "logs"
        for folder in (self.results, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self.request = args.work / "request.json"
        asked = {"device": args.device, "rehearse": args.rehearse, "work": str(args.work)}
        asked |= {"results": str(self.results), "environments": str(args.environments), "ranks": args.ranks}
        self.request.write_text(json.dumps(asked))

    def run(self, stage: Stage) -> str:
        """Run one stage unless it is done; return its state. Its result is written whatever happens."""
        path, again = self.results / f"{stage.name}.json", stage.name in (self.args.only or ())
        before = {} if again else read(path)
        if before.get("state") == "done":
            return "done"
        rows = before.get("rows", {})
        rows = {name: row for name, row in rows.items() if not row.keys() & {"error", "skipped"}}
        limit = min(stage.seconds * self.args.patience, self.until - time.monotonic())
        result = {"stage": stage.name, "summary": stage.summary, "rows": rows}
        if limit < LEAST * self.args.patience:
            write(path, result | {"state": "waits", "why": "no time was left"})
            return "waits"
        began = time.monotonic()
        write(path, result | {"state": "running"})
        state, why = self._until_it_ends(stage.name, path, began + limit)
        result = read(path)
        result.pop("running", None)
        if state == "done" and result.get("why"):  # the worker's own reason
            state, why = "skipped", result["why"]
        write(path, result | {"state": state, "why": why, "seconds": round(time.monotonic() - began, 1)})
        return state

    def _until_it_ends(self, name: str, path: Path, until: float) -> tuple[str, str]:
        """Run the stage's process, again after it died in a row; return state and reason."""
        died = 0
        while True:
            pid = self.start(name, self.request, self.logs / f"{name}.log")
            try:
                code = ended(pid, until)
            except BaseException:
                stop(pid)
                raise
            if code is None:
                stop(pid)
            why = "stopped at its time limit" if code is None else f"its process ended with {code}"
            result = read(path)
            row = result.pop("running", None)
            if row and code != 0:
                result["rows"][row] = {"error": why}
                write(path, result)
            if code is None:
                return "stopped", why
            if code == 0:
                failed = [row for row, found in result["rows"].items() if "error" in found]
                return ("failed", f"rows with errors: {', '.join(failed)}") if failed else ("done", "")
            died += 1
            if not row or died > 5:  # nothing to leave out next time
                return "failed", f"{why}; see {self.logs / name}.log"


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = [stage.name for stage in STAGES]
    add("--only", nargs="+", choices=names, help="these stages, from their beginning")
    add("--minutes", type=float, default=45, help="for all stages together")
    add("--patience", type=float, default=1.0, help="factor of the time limits of stages")
    add("--device", default="cuda")
    add(
        "--ranks", type=int, default=0, help="processes of the last stage (default: a device each, at most 2)"
    )
    add("--work", type=Path, default=ROOT / "gpu-day", help="models, outputs, logs and results")
    add("--results", type=Path, help="instead of WORK/results")
    add("--environments", type=Path, default=ROOT, help="where the .venv-* of clients and peers lie")
    add("--rehearse", action="store_true", help="on the CPU, on tiny models")
    add("--no-run", action="store_true", help="only show what was measured")
    add("--write", action="store_true", help="write a section of the page")
    add("--page", type=Path, default=ROOT / "docs/measurements/gpu.md")
    args = parser.parse_args(given)
    if args.rehearse and args.write and args.page == parser.get_default("page"):
        parser.error("a rehearsal does not replace what a GPU measured: add --page FILE")
    args.device = "cpu" if args.rehearse else args.device
    args.work = args.work.resolve()
    args.results = args.results and args.results.resolve()
    return args


def main(given: list[str] | None = None, start=started) -> int:
    args = arguments(given)
    lines = [] if args.no_run else missing() or no_device(args.device)
    if lines:
        print("missing:", *lines, sep="\n  ", file=sys.stderr)
        return 2
    day, states = Day(args, start), {}
    for stage in STAGES:
        if args.no_run or (args.only and stage.name not in args.only):
            continue
        print(f"{stage.name:8} {stage.summary}", flush=True)
        states[stage.name] = day.run(stage)
        found = read(day.results / f"{stage.name}.json")
        print(f"{'':8} {found['state']}, {len(found['rows'])} rows. {found.get('why', '')}", flush=True)
    text = page.section([read(day.results / f"{stage.name}.json") for stage in STAGES])
    if args.write:
        write_section("gpu-day", text, args.page)
    else:
        print(text)
    return int(any(state in ("failed", "stopped") for state in states.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped: the same command continues")
