"""What the client scripts share: scripts run by other environments' pythons, and sections of a document."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "tests/data/demo-llama-6m"
DOCUMENT = ROOT / "docs/clients.md"


class Failed(Exception):
    """A command ended with an error; the message is the last line that says why."""


def run(command: list[str], log: Path, threads: int = 1, **environment: str) -> None:
    """Run a command; what it prints goes to `log`. Raises Failed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | environment
    with log.open("w") as file:  # some tools leave files where they run: beside the log
        done = subprocess.run(command, env=env, cwd=log.parent, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise Failed(_reason(log.read_text(errors="replace")) or f"exit code {done.returncode}")


def _reason(output: str) -> str:
    """What a log says of the error: quantkit's own line, or a traceback's last with what follows it."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    start = r"error: |Error: |[\w.]*(Error|Exception)\b"
    named = [number for number, line in enumerate(lines) if re.match(start, line)]
    return " ".join(lines[named[-1] :] if named else lines[-1:])[:300].replace("|", "\\|")


def run_script(
    python: str, script: Path, request: dict, path: Path, threads: int = 1, pythonpath: str = ""
) -> None:
    """Write `request` to `path` and run `script path` with another environment's python. Raises Failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(request))
    command = [str(Path(python).absolute()), str(script), str(path)]
    run(command, path.with_suffix(".log"), threads, PYTHONPATH=pythonpath)


def quantkit(*arguments: object) -> str:
    """Run a command of this checkout; return its standard output. Raises CalledProcessError."""
    command = [sys.executable, "-m", "quantkit", *map(str, arguments), "--quiet"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env=env).stdout


def quantkit_logged(arguments: list[str], log: Path) -> None:
    """Run a command of this checkout; its output goes to `log`. Raises Failed."""
    run([sys.executable, "-m", "quantkit", *arguments], log, PYTHONPATH=str(ROOT))


def load_client(python: str, jobs: list[dict], ids: list[list[int]], want: str, folder: Path) -> dict:
    """Results by job name of clients/load_client.py; errors of single jobs are among them."""
    request = {"ids": ids, "want": want, "threads": 1, "jobs": jobs}
    run_script(python, ROOT / "scripts/clients/load_client.py", request, folder / "jobs.json")
    return json.loads((folder / "results.json").read_text())


def table(header: list[str], rows: list[list[str]], left: int | None = None) -> str:
    """Markdown; columns after the first `left` are aligned as numbers, none unless it is given."""
    left = len(header) if left is None else left
    marks = ["---"] * left + ["---:"] * (len(header) - left)
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, marks, *rows])


def write_section(name: str, text: str, document: Path = DOCUMENT) -> None:
    """Print a section and put it between its markers in a document, which must have them."""
    print(text, flush=True)
    content = document.read_text()
    markers = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    assert markers.search(content), f"{document} has no markers for {name}"
    document.write_text(markers.sub(lambda found: found[1] + text + found[2], content))


def versions(results: dict) -> str:
    """Every version that any of the results was computed with."""
    found: dict[str, set[str]] = {}
    for result in results.values():
        for package, version in result.get("versions", {}).items():
            found.setdefault(package, set()).add(version)
    return ", ".join(f"{package} {' and '.join(sorted(found[package]))}" for package in sorted(found))
