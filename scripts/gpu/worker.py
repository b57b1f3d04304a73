"""One stage of scripts/gpu_day: worker.py STAGE REQUEST.json. The result has its rows as they come."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BROKEN = 71  # exit code of a process whose device no longer computes: a new one goes on


class Skipped(Exception):
    """A row or a stage that cannot run here; the message says why."""


class Failed(Exception):
    """A command ended with an error; the message is what it said."""


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
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.result, indent=1) + "\n")
        partial.replace(self.path)

    def row(self, name: str, measure: Callable[..., dict], *arguments) -> None:
        """Keep what `measure(*arguments)` returns, its error or its reason as a row, unless there is one."""
        if name in self.result["rows"]:
            return
        self.result["running"] = name
        self.save()
        began = time.monotonic()
        try:
            found = measure(*arguments)
        except Skipped as why:
            found = {"skipped": str(why)}
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        found["took"] = round(time.monotonic() - began, 3)
        self.result["rows"][name] = found
        del self.result["running"]
        self.save()
        if "error" in found and not self.works():
            print("the device no longer computes: starting again", flush=True)
            sys.exit(BROKEN)

    def works(self) -> bool:
        """Whether the device still computes after an error; some errors end a process's use of it."""
        import torch

        try:
            torch.ones(2, device=self.device).sum().item()
            return True
        except RuntimeError:
            return False


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


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage")
    parser.add_argument("request", type=Path)
    args = parser.parse_args(given)
    asked = json.loads(args.request.read_text())
    places = {name: Path(asked.pop(name)) for name in ("work", "results", "environments")}
    run = Run(args.stage, **asked, **places)
    run.result = json.loads(run.path.read_text())
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # quantkit may not be installed
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": ":".join(paths)}
    os.environ.setdefault("QUANTKIT_DEVICE", "far" if run.rehearse else run.device)
    from gpu import on_device, others, proofs

    (stage,) = (getattr(room, args.stage) for room in (on_device, proofs, others) if args.stage in vars(room))
    try:
        stage(run)
    except Skipped as why:
        run.result["why"] = str(why)
    run.save()
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]
    from gpu import worker  # the same module that stages import

    sys.exit(worker.main())
