"""Runs the shell steps of CI templates as their services would: bash, with quantkit answered by this process.

`python`, `pip` and clients of the service are stand-ins on the PATH that write down how they were called.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CALL = """#!{python} -IS
import json, os, socket, sys
place = socket.socket(socket.AF_UNIX)
place.connect({place!r})
with place.makefile("rw") as wire:
    wire.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
    wire.flush()
    code, out, err = json.loads(wire.readline())
sys.stdout.write(out), sys.stderr.write(err)
sys.exit(code)
"""
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
STRICT = "set -eo pipefail\n"  # as both services start bash


@dataclass
class Shell:
    """Runs scripts in `folder`, with `more` environment variables.

    programs: name -> what answers a call: arguments to (code, out, err).
    """

    folder: Path
    programs: Mapping[str, Callable[[list[str]], tuple[int, str, str]]]
    more: Mapping[str, str] = field(default_factory=dict)
    calls: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        place = self.folder / "calls"
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(place))
        self.listener.listen()
        self.listener.settimeout(0.02)
        for name in self.programs:
            (self.bin / name).write_text(CALL.format(python=sys.executable, place=str(place)))
            (self.bin / name).chmod(0o755)

    def run(self, script: str, environment: Mapping[str, str]) -> tuple[int, str]:
        """Return exit code and output of a script."""
        env = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.folder), **self.more, **environment}
        command = ["bash", "--noprofile", "--norc", "-c", STRICT + script]
        with open(self.folder / "log", "w+") as log:
            process = subprocess.Popen(command, cwd=self.folder, env=env, stdout=log, stderr=log)
            while process.poll() is None:
                try:
                    wire = self.listener.accept()[0]
                except TimeoutError:
                    continue
                with wire, wire.makefile("rw") as lines:
                    called = json.loads(lines.readline())
                    self.calls.append(called)
                    lines.write(json.dumps(self.programs[called[0]](called[1:])) + "\n")
            log.seek(0)
            return process.returncode, log.read()


class Action:
    """A composite action of GitHub. github: its context. `ran` names the steps that ran."""

    def __init__(self, action: dict[str, Any], shell: Shell, github: dict[str, Any], place: Path):
        self.action, self.shell, self.github, self.place = action, shell, github, place
        self.python = "python"
        self.ran: list[str] = []
        self.uses: dict[str, dict[str, str]] = {}
        self.log = ""

    def run(self, inputs: dict[str, str]) -> int:
        """Return the exit code of the last step; the first that fails ends the run."""
        temp = self.shell.folder / "temp"
        temp.mkdir(exist_ok=True)
        rows = self.action["inputs"].items()
        assert inputs.keys() >= {name for name, row in rows if row.get("required")}
        defaults = {name: row.get("default", "") for name, row in rows}
        assert inputs.keys() <= defaults.keys()
        self.context = {"github": self.github, "steps": {"python": {"outputs": {"python-path": self.python}}}}
        self.context["inputs"] = {
            name: self.filled(str(value)) for name, value in (defaults | inputs).items()
        }
        for number, step in enumerate(self.action["runs"]["steps"]):
            if "if" in step and not self.holds(step["if"]):
                continue
            self.ran.append(step.get("name") or step["uses"])
            if "uses" in step:
                self.uses[step["uses"]] = {key: self.filled(str(text)) for key, text in step["with"].items()}
                continue
            assert step["shell"] == "bash"
            files = {key: temp / f"{key}-{number}" for key in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
            for path in files.values():
                path.touch()
            env = {key: self.filled(str(text)) for key, text in step.get("env", {}).items()}
            env |= {"RUNNER_TEMP": str(temp), "GITHUB_ACTION_PATH": str(self.place)}
            env |= {"GITHUB_REPOSITORY": self.github["repository"]}
            env |= {key: str(path) for key, path in files.items()}
            code, log = self.shell.run(step["run"], env)
            self.log += log
            if summary := files["GITHUB_STEP_SUMMARY"].read_text():
                self.summary = summary
            if "id" in step:
                rows = (line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
                self.context["steps"][step["id"]] = {"outputs": dict(rows)}
            if code:
                return code
        return 0

    def outputs(self) -> dict[str, str]:
        return {name: self.filled(row["value"]) for name, row in self.action["outputs"].items()}

    def filled(self, text: str) -> str:
        """Return a text with the values of its expressions."""
        return EXPRESSION.sub(lambda found: self.value(found[1]), text)

    def value(self, path: str) -> str:
        found: Any = self.context
        for part in path.split("."):
            found = found.get(part, "") if found else ""
        return str(found)

    def holds(self, condition: str) -> bool:
        """Return the value of `a == 'b' && c != 'd'`."""
        terms = EXPRESSION.fullmatch(condition)[1].split(" && ")
        parts = [re.fullmatch(r"([\w.-]+) (==|!=) '([^']*)'", term).groups() for term in terms]
        return all((self.value(path) == text) == (sign == "==") for path, sign, text in parts)


def gitlab(job: dict[str, Any], shell: Shell, variables: dict[str, str]) -> tuple[int, str]:
    """Run a job as GitLab does: its scripts in one shell."""
    script = "\n".join([*job["before_script"], *job["script"]])
    return shell.run(script, job["variables"] | variables)
