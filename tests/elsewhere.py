"""The other process of stand_in_hub.Elsewhere: a JSON request a line on stdin, an answer a line on stdout."""

import contextlib
import io
import json
import sys

import speed_of_tests

from quantkit import cli
from quantkit.capacity import speed
from quantkit.errors import QuantkitError
from quantkit.models.files.open import open_checkpoint
from quantkit.options import CalibrationOptions
from quantkit.text import calibration, sources

speed.of_machine = lambda dtype: speed_of_tests.SPEED


def run(arguments: list[str]) -> dict:
    """A quantkit command as typed."""
    sys.argv = ["quantkit", *arguments]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def calibrate(model: str, offline: bool = False, **options) -> dict:
    """The record and the tokens of a calibration set."""
    try:
        found = calibration.load(open_checkpoint(model), CalibrationOptions(**options), offline)
    except QuantkitError as error:
        return {"message": error.message, "hint": error.hint, "code": error.exit_code}
    return {**found.record(), "tokens": found.tokens.tolist(), "warning": found.warning}


def download(repo: str, patterns: list[str] | None = None) -> dict:
    """What `hf download REPO --repo-type dataset` does."""
    from huggingface_hub import snapshot_download

    return {"folder": snapshot_download(repo, repo_type="dataset", allow_patterns=patterns)}


def held_out(text: str) -> dict:
    """Name and content of a text to evaluate on."""
    try:
        return dict(
            zip(("name", "text"), sources.held_out(text, lambda talk: str(talk.messages)), strict=True)
        )
    except QuantkitError as error:
        return {"message": error.message, "code": error.exit_code}


for line in sys.stdin:
    request = json.loads(line)
    known = {"run": run, "calibrate": calibrate, "download": download, "held_out": held_out}
    answer = known[request.pop("do")]
    print(json.dumps(answer(**request)), flush=True)
