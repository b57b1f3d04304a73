"""Places that are no use are refused before the work, in a line; so is what a stranger left in staging."""

import errno
import io
import json
import os
import re
import subprocess
import sys

import families
import pytest

from quantkit.quantize.staging import may_replace
from quantkit.quantize.staging.folder import Staging

GPTQ = "gptq model --solver rtn --group-size 32".split()


@pytest.fixture
def model(tmp_path):
    families.save_tokenizer(families.save_model(tmp_path / "model", "llama", num_hidden_layers=1))
    (tmp_path / "text.txt").write_text("\n".join(families.sentences()))
    return tmp_path / "model"


@pytest.mark.parametrize(
    "command", [GPTQ, "imatrix model --calibration text.txt".split()], ids=["gptq", "imatrix"]
)
@pytest.mark.parametrize(
    "output, said",
    [
        ("n" * 300, "File name too long"),
        ("n" * 250, "File name too long"),
        (os.fsdecode(b"\xffout"), "is not a UTF-8 name"),
        ("text.txt/out", "cannot be a new file or folder"),
        ("link", "is not a plain file or folder|link exists"),
    ],
)
def test_an_output_that_cannot_be(refuse, model, command, output, said):
    (model.parent / "link").symlink_to("nowhere")
    error, _ = refuse(2, *command, "-o", output)
    assert re.search(said, error)


@pytest.mark.parametrize(
    "command", [GPTQ, "imatrix model --calibration text.txt".split()], ids=["gptq", "imatrix"]
)
def test_a_folder_that_cannot_be_written(refuse, monkeypatch, model, command):
    """As root may write anywhere, the system's answer is given here."""

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(may_replace.tempfile, "TemporaryFile", denied)
    error, _ = refuse(2, *command, "-o", "out.gguf" if command[0] == "imatrix" else "out")
    assert error.endswith("cannot be written: Permission denied")


@pytest.mark.parametrize("denied, named", [("here", "here/out"), ("out.partial", "here/out.partial/lock")])
def test_a_dry_run_names_what_cannot_be_written(make, monkeypatch, model, denied, named):
    (model.parent / "here" / "out.partial").mkdir(parents=True)
    (model.parent / "here" / "out.partial" / "lock").touch()  # an unfinished job of another user

    def temporary_file(dir):
        if dir.name == denied:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return io.BytesIO()

    monkeypatch.setattr(may_replace.tempfile, "TemporaryFile", temporary_file)
    refused = make(*GPTQ, "-o", "here/out", "--resume", "--dry-run")["refused"]
    assert refused["message"] == f"{named} cannot be written: Read-only file system"


@pytest.mark.parametrize(
    "stored",
    [
        {"execution": {"threads": -5}},
        {"execution": {"threads": 1025}},
        {"execution": {"threads": True}},
        {"execution": {"batch_size": "4"}},
        {"execution": {"dtype": 7}},
        {"execution": []},
        {},
    ],
)
def test_a_fingerprint_of_absurd_values(refuse, model, stored):
    folder = model.parent / "out.partial"
    folder.mkdir()
    (folder / "fingerprint.json").write_text(
        json.dumps({"quantkit": "1", "source_sha256": "ab" * 32} | stored)
    )
    error, hint = refuse(2, *GPTQ, "-o", "out", "--resume")
    assert error == "out.partial/fingerprint.json is damaged: its execution is invalid"
    assert hint == "start again with --overwrite"


def test_scales_of_zero_in_a_staged_block_are_made_again(quantkit, model, monkeypatch):
    from safetensors.torch import load_file, save_file

    def stop(*_, **__):
        raise RuntimeError("stopped here")

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "assemble", stop)
        assert quantkit(*GPTQ, "-o", "out").code == 1
    path = model.parent / "out.partial" / "block-00000.safetensors"
    tensors = load_file(path)
    save_file({name: t * 0 if name.endswith("scales") else t for name, t in tensors.items()}, path)
    done = quantkit(*GPTQ, "-o", "out", "--resume")
    assert done.code == 0 and "damaged staged blocks are quantized again: 1" in done.err


def test_weights_that_are_links_out_of_the_folder_are_refused(refuse, model):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("/proc/self/mem")
    error, _ = refuse(4, "inspect", "model")
    assert error == "model holds links that lead out of it: model.safetensors"


def test_a_text_that_is_a_device_is_not_read(refuse, model):
    error, _ = refuse(4, "eval", "model", "--text", "/dev/zero", "--limit", "512")
    assert error == "/dev/zero is not a plain file"


def test_an_interrupt_while_the_command_line_is_imported(tmp_path):
    (tmp_path / "typer.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), os.getcwd()])
    command = "import signal; signal.signal(2, signal.default_int_handler); "  # may be ignored here
    command += "from quantkit import __main__ as command; command.main()"
    done = subprocess.run(
        [sys.executable, "-c", command], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")
