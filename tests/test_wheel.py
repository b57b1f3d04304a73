"""The wheel, built and installed: what a user gets, away from the repository."""

import email
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from quantkit import __version__

REPOSITORY = Path(__file__).parents[1]
DATA = ("recipes", "calibration", "heldout")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, REPOSITORY]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.iterdir()
    assert path.name == f"quantkit-{__version__}-py3-none-any.whl"
    return path


def test_the_wheel_holds_the_package_and_its_data_and_no_more(wheel):
    packed = zipfile.ZipFile(wheel)
    names = {name for name in packed.namelist() if ".dist-info/" not in name}
    kinds = ("py", "pyi", "typed", "html", "jinja", "yaml", "json", "jsonl")
    patterns = [f"**/*.{kind}" for kind in kinds]
    places = [(REPOSITORY / "quantkit", pattern, "quantkit") for pattern in patterns]
    places += [(REPOSITORY / name, "*", f"quantkit/data/{name}") for name in DATA]
    expected = {
        f"{place}/{path.relative_to(folder).as_posix()}": path
        for folder, pattern, place in places
        for path in folder.glob(pattern)
        if path.is_file()
    }
    assert names == expected.keys()
    assert {Path(name).suffix for name in names} == {".txt", ".md", *(f".{kind}" for kind in kinds)}
    assert all(packed.read(name) == path.read_bytes() for name, path in expected.items())


def test_the_metadata_is_what_an_index_shows(wheel):
    packed = zipfile.ZipFile(wheel)
    (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
    found = email.message_from_bytes(packed.read(name))
    assert found["License-Expression"] == "Apache-2.0" and found["Requires-Python"] == ">=3.11"
    assert {"Typing :: Typed", "Environment :: Console"} <= set(found.get_all("Classifier"))
    assert set(found.get_all("Provides-Extra")) == {"tasks", "serve", "test"}
    assert "Development Status" in " ".join(found.get_all("Classifier"))
    assert found.get_payload().startswith("# quantkit")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """`bin` of an environment that has the wheel, and this one's other packages behind it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", "-q", wheel]
    subprocess.run(pip, check=True)
    own = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(own, "others.pth").write_text(sysconfig.get_path("purelib"))  # no .pth in there is followed
    return folder / "bin"


def run(folder: Path, *command) -> subprocess.CompletedProcess:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run([*map(str, command)], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.nightly
def test_the_installed_command_needs_nothing_of_the_repository(installed, tiny_model, tmp_path):
    """It finds the shipped text and recipes inside the package."""
    model = tiny_model("llama", name="tiny", tokenizer=True)
    here = "import quantkit; print(quantkit.__file__)"
    place = Path(run(tmp_path, installed / "python", "-I", "-c", here).stdout.strip())
    assert installed.parent in place.parents and place.name == "__init__.py"
    version = run(tmp_path, installed / "python", "-I", "-m", "quantkit", "--version")
    assert (version.returncode, version.stdout) == (0, f"quantkit {__version__}\n")
    options = "--group-size 32 --samples 4 --seqlen 64 --recipe gptq-w3 --dry-run --json -q".split()
    done = run(tmp_path, installed / "quantkit", "gptq", model, *options)
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(done.stdout)
    assert (record["options"]["bits"], record["options"]["group_size"]) == (3, 32)
    calibration = record["calibration"]
    assert (calibration["source"], calibration["samples"], calibration["seqlen"]) == ("shipped", 4, 64)
