"""Where stdout and stderr lead: encodings without most signs, streams that are closed, files cut short."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nights import nightly
from safetensors import SafetensorError

from quantkit import errors
from quantkit.errors import QuantkitError, full_disk
from quantkit.quantize.staging.folder import disk_errors

ROOT = Path(__file__).parents[1]


def shell(command: str, encoding: str = "utf-8") -> subprocess.CompletedProcess:
    quantkit = f"{sys.executable} -m quantkit"
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.run(
        ["bash", "-c", command.replace("quantkit", quantkit, 1)], capture_output=True, env=environment
    )


@pytest.mark.parametrize("encoding", ["ascii", *nightly("latin-1")])
def test_other_encodings_get_plain_signs(encoding):
    done = shell("quantkit gguf --help", encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    wanted = shell("quantkit gguf --help").stdout.decode()
    assert "…" in wanted and b"IQ2_M ." in done.stdout and done.stdout.count(b"?") == wanted.count("?")


def test_errors_are_plain_too():
    done = shell("quantkit inspect './modèle – ü'", "ascii")
    assert done.returncode == errors.NOT_FOUND
    assert done.stderr.startswith(b"error: no such folder: ./mod?le - ?\nhint: ")


@pytest.mark.parametrize(
    "command, code",
    [
        ("quantkit recipes list >&-", 0),
        ("quantkit recipes list 2>&-", 0),
        ("quantkit inspect ./none >&- 2>&-", errors.NOT_FOUND),
    ],
)
def test_closed_streams_swallow_what_is_said(command, code):
    done = shell(command)
    assert (done.returncode, done.stderr) == (code, b"")


@pytest.mark.parametrize(
    "error, said",
    [
        (OSError(errno.EFBIG, "File too large"), "allows no file of this size"),
        (SafetensorError("Error while serializing: I/O error: File too large (os error 27)"), "ulimit -f"),
        (SafetensorError("Error while serializing: No space left on device (os error 28)"), "is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the quota is used up"),
        (OSError(errno.EIO, "Input/output error"), "input/output error"),
        (RuntimeError("unable to open file </a/b> in read-only mode: Input/output error (5)"), "error"),
    ],
)
def test_a_disk_that_takes_no_more_says_why(error, said):
    with pytest.raises(QuantkitError, match=f"^the disk of place .*{said}") as raised:
        with disk_errors(Path("place")):
            raise error
    assert raised.value.exit_code == errors.RESOURCES
    assert ("raise the limit; then" in raised.value.hint) == ("too large" in str(error))


def test_a_write_that_is_denied_is_told_as_the_folders_though_it_names_none():
    with pytest.raises(QuantkitError, match="^place cannot be written any more: permission denied$"):
        with disk_errors(Path("place")):
            raise SafetensorError("Error while serializing: I/O error: Permission denied (os error 13)")


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "denied"), SafetensorError("(os error 2)")])
def test_other_errors_are_none_of_the_disk(error):
    assert full_disk(error) is None
