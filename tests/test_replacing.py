"""What a job may replace, and what it never touches: devices, pipes, links, mount points, files of others."""

import json
import os
import socket
from contextlib import suppress

import numpy as np
import pytest

from quantkit.errors import USAGE, QuantkitError
from quantkit.models.files import gguf_shards
from quantkit.models.files.gguf_file import read_header
from quantkit.models.files.gguf_writer import Entry, writing
from quantkit.quantize.staging import may_replace
from quantkit.quantize.staging.folder import Staging

OURS = '{"quantkit": "1", "source_sha256": "' + "ab" * 32 + '"}'


def refusal(output, one_file=False, overwrite=True) -> str:
    with pytest.raises(QuantkitError) as refused:
        may_replace.check(output, one_file, overwrite)
    assert refused.value.exit_code == USAGE and "choose another -o" in refused.value.hint
    return refused.value.message


@pytest.mark.parametrize("one_file", [True, False])
@pytest.mark.parametrize("overwrite", [True, False])
def test_what_is_no_file_or_folder_is_never_replaced(tmp_path, one_file, overwrite):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(tmp_path)
    for place in (*tmp_path.iterdir(), tmp_path.__class__(os.devnull), tmp_path.__class__("/proc")):
        assert refusal(place, one_file, overwrite) == f"{place} is not a plain file or folder"
    assert sorted(os.listdir(tmp_path)) == ["fifo", "gone", "link"]


def test_sockets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("s")
        assert refusal(tmp_path / "s").endswith("is not a plain file or folder")


def test_a_file_is_replaced_by_a_file_of_its_kind(tmp_path):
    for name, content in {
        "a.gguf": b"GGUF\x03",
        "empty": b"",
        "file.py": b"import os",
        "short": b"GG",
    }.items():
        (tmp_path / name).write_bytes(content)
    for name in ("a.gguf", "empty"):
        may_replace.check(tmp_path / name, True, True)
        assert "the job writes a folder" in refusal(tmp_path / name)
        assert "exists" in refusal(tmp_path / name, True, overwrite=False)
    for name in ("file.py", "short"):
        assert "is not a GGUF file: it would be lost" in refusal(tmp_path / name, True)
    assert "is a folder, the job writes a file" in refusal(tmp_path, True)
    may_replace.check(tmp_path / "new", True, False)
    may_replace.check(tmp_path / "empty" / "below", True, False)  # other checks refuse that


def test_an_unquantized_file_of_another_program_is_kept(quantkit, tiny_model, tmp_path):
    """A 16-bit GGUF file may be the only copy of a model; quantkit's own can be made again."""
    model = tiny_model("llama", tokenizer=True)
    job = ("gguf", model, "-t", "F16", "-o", "x.gguf", "-q")
    assert quantkit(*job).code == 0 and quantkit(*job, "--overwrite").code == 0
    metadata, infos = read_header(tmp_path / "x.gguf")
    own = {key: value for key, value in metadata.items() if not key.startswith(("quantkit.", "tokenizer."))}
    entries = [Entry(name, info.dtype, tuple(info.shape)) for name, info in infos.items()]
    with writing(tmp_path / "x.gguf", own, entries) as write:
        for entry in entries:
            write(entry.name, [np.zeros(entry.nbytes, np.uint8)])
    assert "holds an unquantized model that quantkit did not write" in refusal(tmp_path / "x.gguf", True)


def test_a_folder_is_replaced_if_every_file_is_a_checkpoints(tmp_path):
    names = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "README.md"]
    names += ["tokenizer.json", "quantkit.json", "quantkit-timings.json", "quantize_config.json", "LICENSE"]
    may_replace.check(tmp_path, False, True)  # empty
    for name in names:
        (tmp_path / name).touch()
    templates = tmp_path / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").touch()
    may_replace.check(tmp_path, False, True)
    (templates / "notes.txt").touch()
    assert f"contains other files, {templates.name}: it would" in refusal(tmp_path)
    (templates / "notes.txt").unlink()
    (tmp_path / ".git").mkdir()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "other.safetensors").symlink_to(tmp_path / "config.json")
    assert "contains other files, .git, notes.txt, other.safetensors: it would" in refusal(tmp_path)


def test_a_staging_folder_is_ours_if_it_says_so(tmp_path):
    staging = Staging(tmp_path / "out")
    staging.check(resume=False, overwrite=True)
    staging.folder.mkdir()
    (staging.folder / "lock").touch()  # of a job that was killed at once
    staging.check(resume=True, overwrite=False)
    for content in (
        "[]",
        "no JSON",
        "{}",
        '{"source_sha256": "x"}',
        '{"quantkit": "1", "source_sha256": "x"}',
        "",
        "null",
        "[" * 5000,
    ):
        (staging.folder / "fingerprint.json").write_text(content)
        for modes in ((True, False), (False, True)):
            with pytest.raises(QuantkitError, match="is not an unfinished job") as refused:
                staging.check(*modes)
            assert "move it away" in refused.value.hint
    (staging.folder / "fingerprint.json").write_text(OURS)
    staging.check(resume=True, overwrite=False)
    (staging.folder / "thesis.tex").touch()
    with pytest.raises(QuantkitError, match="files that no job writes, which would be lost: thesis.tex"):
        staging.check(resume=False, overwrite=True)
    (staging.folder / "thesis.tex").unlink()
    other = Staging(tmp_path / "linked")
    other.folder.symlink_to(staging.folder)
    with pytest.raises(QuantkitError, match="is not an unfinished job"):
        other.check(resume=False, overwrite=True)
    with pytest.raises(QuantkitError, match="is not an unfinished job"):
        other.check(resume=True, overwrite=False)


def test_an_unquantized_model_of_others_is_not_replaced(tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "holds an unquantized model that quantkit did not write" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    may_replace.check(tmp_path, False, True)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "quantkit.json").touch()  # written by a job, quantized or not
    may_replace.check(tmp_path, False, True)


def test_what_appears_while_a_job_runs_is_asked_again(tmp_path):
    staging = Staging(tmp_path / "out")
    staging.check(resume=False, overwrite=True)
    with staging.opened({"source_sha256": "ab"}, resume=False):
        with staging.assemble() as place:
            place.mkdir()
        os.mkfifo(staging.output)
        with pytest.raises(QuantkitError, match="is not a plain file or folder"):
            staging.publish()


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("renames", range(5))
def test_the_old_output_is_there_until_the_new_one_is(tmp_path, monkeypatch, shards, renames):
    """A job ends before one of its renames. The next job finds all shards of the old output, or the new."""
    for number in (1, 2):
        (tmp_path / f"out-0000{number}-of-00002.gguf").write_bytes(b"GGUF old")
    rename, left, fingerprint = os.rename, iter(range(renames)), json.loads(OURS) | {"execution": {}}
    staging = Staging(tmp_path / "out.gguf", one_file=True)
    staging.check(resume=False, overwrite=True)
    with monkeypatch.context() as patch, suppress(StopIteration), staging.opened(fingerprint, False):
        for number in range(1, shards + 1):
            path = staging.folder / f"output-0000{number}-of-0000{shards}.gguf"
            path.write_bytes(b"GGUF new")
        patch.setattr(os, "rename", lambda *paths: (next(left), rename(*paths)))
        staging.publish()
    whole = renames == 2 + shards
    assert staging.folder.exists() != whole

    again = Staging(tmp_path / "out.gguf", one_file=True)
    again.check(resume=False, overwrite=True)
    with again.opened(fingerprint, resume=False):
        kind, count = ("new", shards) if whole else ("old", 2)
        for number in range(1, count + 1):
            shard = tmp_path / f"out-0000{number}-of-0000{count}.gguf"
            assert shard.read_bytes() == f"GGUF {kind}".encode()
    assert gguf_shards.first(again.output).name == f"out-00001-of-0000{count}.gguf"


def test_an_old_output_that_came_back_is_asked_for_again(tmp_path):
    """Between the two renames of a killed job; the job that resumes it may not replace."""
    (tmp_path / "out.partial" / "replaced" / "out").mkdir(parents=True)
    (tmp_path / "out.partial" / "replaced" / "out" / "config.json").touch()
    (tmp_path / "out.partial" / "fingerprint.json").write_text(OURS)
    staging = Staging(tmp_path / "out")
    staging.check(resume=True, overwrite=False)
    with pytest.raises(QuantkitError, match="out exists"):
        with staging.opened({"source_sha256": "ab"}, resume=False):
            pass
    assert os.listdir(tmp_path / "out") == ["config.json"]
