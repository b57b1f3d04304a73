"""A model that changes while it is read is noticed and named, and nothing made of two is published."""

import os
import shutil
from pathlib import Path

import families
import pytest
from jobs import contents
from nights import nightly

from quantkit.evaluation.stream import StreamedModel
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.quantize.calibrate import importance
from quantkit.quantize.outputs.gguf import GgufOutput
from quantkit.quantize.staging.folder import Staging

GPTQ = "gptq model -o out --group-size 32 --samples 2 --seqlen 16 --calibration text.txt -q"
GPTQ += " --transform none --refine 0"


def overwritten(model: Path) -> str:
    """In place, by weights of the same sizes; a second later, whatever the file system's clock."""
    shutil.copyfile(model.parent / "other" / "model.safetensors", model / "model.safetensors")
    _later(model / "model.safetensors")
    return "model.safetensors changed"


def replaced(model: Path) -> str:
    """As downloads are: a new file under the same name."""
    shutil.copy(model.parent / "other" / "model.safetensors", model / "new")
    os.replace(model / "new", model / "model.safetensors")
    return "model.safetensors changed"


def cut_short(model: Path) -> str:
    os.truncate(model / "model.safetensors", 4096)
    return "model.safetensors changed"


def without_tokenizer(model: Path) -> str:
    (model / "tokenizer.json").unlink()
    return "tokenizer.json gone"


def configured(model: Path) -> str:
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    return "config.json changed"


def _later(path: Path) -> None:
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 10**9))


@pytest.fixture
def model(tmp_path) -> Path:
    for name, seed in [("model", 0), ("other", 1)]:
        families.save_tokenizer(families.save_model(tmp_path / name, "llama", seed=seed, num_hidden_layers=2))
    (tmp_path / "text.txt").write_text("\n".join(families.sentences()))
    return tmp_path / "model"


def just_before(monkeypatch, kind, name: str, action, call: int = 1) -> list[str]:
    """Do `action` before the `call`-th call; what it returned, once it was done."""
    whole, calls, said = getattr(kind, name), [], []

    def called(*arguments, **options):
        calls.append(name)
        if len(calls) == call:
            said.append(action())
        return whole(*arguments, **options)

    monkeypatch.setattr(kind, name, called)
    return said


@pytest.mark.parametrize("change", [overwritten, *nightly(cut_short, configured)])
def test_a_source_that_changes_behind_the_first_block(quantkit, monkeypatch, model, change):
    assert quantkit(*GPTQ.split(), "-o", "whole/out").code == 0
    kept = shutil.copytree(model, model.parent / "kept")
    with monkeypatch.context() as patch:
        said = just_before(patch, Staging, "write_block", lambda: change(model))
        done = quantkit(*GPTQ.split())
    assert done.code == 1 and not (model.parent / "out").exists()
    assert done.err.startswith(f"error: model was changed while it was read: {said[0]}\nhint: ")
    if change in (overwritten, configured):
        again = quantkit(*GPTQ.split(), "--resume")
        assert again.code == 2 and "different: files of the model (" in again.err
    shutil.rmtree(model)
    kept.rename(model)
    assert len(list((model.parent / "out.partial").glob("block-*.safetensors"))) == 1
    assert quantkit(*GPTQ.split(), "--resume").code == 0
    assert contents(model.parent / "out") == contents(model.parent / "whole" / "out")


@pytest.mark.parametrize(
    "change, kind, name",
    [
        (overwritten, Staging, "assemble"),
        (cut_short, Staging, "assemble"),
        (replaced, Checkpoint, "write_companions"),
        (without_tokenizer, Checkpoint, "write_companions"),
    ],
)
def test_a_source_that_changes_while_the_output_is_written(quantkit, monkeypatch, model, change, kind, name):
    said = just_before(monkeypatch, kind, name, lambda: change(model))
    done = quantkit(*"nf4 model -o out -q".split())
    assert done.code == 1 and not (model.parent / "out").exists()
    assert done.err.startswith(f"error: model was changed while it was read: {said[0]}\n")


def test_a_hash_of_another_source_is_not_taken(quantkit, monkeypatch, model):
    said = just_before(monkeypatch, Checkpoint, "sha256", lambda: overwritten(model))
    done = quantkit(*GPTQ.split())
    assert done.code == 1 and said[0] in done.err and not (model.parent / "out.partial").exists()


def test_gguf_importance_and_evaluation_notice_it(quantkit, monkeypatch, model):
    for kind, name, command in [
        (GgufOutput, "write", "gguf model -t Q8_0 --solver rtn -o m.gguf"),
        (importance, "gather", "imatrix model -o m.gguf --samples 1 --seqlen 16"),
        (StreamedModel, "states", "eval model --text text.txt --ctx 64 --limit 128"),
    ]:
        with monkeypatch.context() as patch:
            said = just_before(patch, kind, name, lambda: replaced(model))
            done = quantkit(*command.split(), "-q")
        assert done.code == 1 and f"model was changed while it was read: {said[0]}" in done.err
        assert not (model.parent / "m.gguf").exists()
