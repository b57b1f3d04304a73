"""What a stage of scripts/gpu_day gets: where it works, and rows that are kept as they come."""

from __future__ import annotations

import io
import json
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

from common import Failed

BROKEN = 71  # exit code of a process whose device no longer computes: a new one goes on


class Skipped(Exception):
    """A row or a stage that cannot run here; the message says why."""


@dataclass
class Run:
    """A stage that runs. device: cuda, or cpu in a rehearsal, where jobs run on the tests' double of one."""

    stage: str
    device: str
    rehearse: bool
    work: Path
    results: Path
    environments: Path
    ranks: int
    result: dict = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.results / f"{self.stage}.json"

    def save(self) -> None:
        write(self.path, self.result)

    def row(self, name: str, measure: Callable[..., dict], *arguments) -> None:
        """Keep what `measure(*arguments)` returns, its error or its reason as a row, unless there is one."""
        if name in self.result["rows"]:
            return
        self.result["running"] = name
        self.save()
        began = time.monotonic()
        try:
            row = measure(*arguments)
        except Skipped as why:
            row = {"skipped": str(why)}
        except Exception as error:
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        row["took"] = round(time.monotonic() - began, 3)
        self.result["rows"][name] = row
        del self.result["running"]
        self.save()
        if "error" in row and not self.works():
            print("the device no longer computes: starting again", flush=True)
            sys.exit(BROKEN)

    def works(self) -> bool:
        """Return whether the device still computes after an error; some errors end a process's use of it."""
        import torch

        try:
            torch.ones(2, device=self.device).sum().item()
            return True
        except RuntimeError:
            return False


def write(path: Path, result: dict) -> None:
    """Replace a result at once: a reader never sees half a file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


def command(*arguments: object) -> dict:
    """Run a command of quantkit in this process; return what `--json` prints. Raises Failed."""
    from quantkit import cli

    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["quantkit", *map(str, arguments), "--json", "-q"]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        if end.code:
            raise Failed(err.getvalue() or f"exit code {end.code}") from None
    finally:
        sys.argv = before
        print(err.getvalue(), end="", flush=True)
    return json.loads(out.getvalue())
