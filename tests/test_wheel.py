"""The packages, built and installed: what a user gets, away from the repository."""

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from trove_classifiers import classifiers

from quantkit import __version__
from quantkit.serving.engines.choose import ENGINES

REPOSITORY = Path(__file__).parents[1]
DATA = ("recipes", "calibration", "heldout")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = {name: list(map(Requirement, rows)) for name, rows in PROJECT["optional-dependencies"].items()}


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, REPOSITORY]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {path.name for path in folder.iterdir()}
    assert names == {f"quantkit-{__version__}-py3-none-any.whl", f"quantkit-{__version__}.tar.gz"}
    return folder


@pytest.fixture(scope="module")
def wheel(packages) -> Path:
    return next(packages.glob("*.whl"))


def test_the_sdist_holds_the_repository_without_data_of_tests(packages):
    """The wheel is built from it, so nothing that a build needs is missing."""
    (path,) = packages.glob("*.tar.gz")
    with tarfile.open(path) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    places = "quantkit docs scripts tests templates recipes calibration heldout".split()
    expected = {
        found.relative_to(REPOSITORY).as_posix()
        for place in places
        for found in (REPOSITORY / place).rglob("*")
        if found.is_file() and "__pycache__" not in found.parts and "data" not in found.parts
    }
    tops = "README.md LICENSE CHANGELOG.md CONTRIBUTING.md Dockerfile compose.yaml action.yml pyproject.toml"
    assert names >= expected | set(tops.split()) and not [name for name in names if "tests/data/" in name]
    assert path.stat().st_size < 2_000_000


def test_the_wheel_is_small(wheel):
    """A tenth of what its largest dependency but one weighs."""
    assert wheel.stat().st_size < 1_200_000


def test_extras_have_what_the_code_asks_for():
    named = {extra: {requirement.name for requirement in rows} for extra, rows in EXTRAS.items()}
    assert named["vllm"] == set(ENGINES["vllm"].packages) and named["llamacpp"] == set(
        ENGINES["llama.cpp"].packages
    )
    assert {"transformers", "openai"} == named["serve"] < set(ENGINES["transformers"].packages)
    pages = [*(REPOSITORY / "quantkit").rglob("*.py"), *(REPOSITORY / "docs").rglob("*.md")]
    pages += [REPOSITORY / "README.md"]
    pattern = r"(?:quantkit|'\.)\[([a-z,]+)\]"
    asked = {
        extra
        for page in pages
        for found in re.findall(pattern, page.read_text())
        for extra in found.split(",")
    }
    assert {"tasks", "llamacpp", "vllm"} <= asked <= EXTRAS.keys()


def test_the_wheel_holds_the_package_and_its_data_and_no_more(wheel):
    packed = zipfile.ZipFile(wheel)
    names = {name for name in packed.namelist() if ".dist-info/" not in name}
    kinds = ("py", "pyi", "typed", "html", "jinja", "yaml", "json", "jsonl")
    patterns = [f"**/*.{kind}" for kind in kinds]
    places = [(REPOSITORY / "quantkit", pattern, "quantkit") for pattern in patterns]
    places += [(REPOSITORY / name, "**/*", f"quantkit/data/{name}") for name in DATA]
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
    shown = set(found.get_all("Classifier"))
    assert {"Typing :: Typed", "Environment :: Console", "Programming Language :: Python :: 3.11"} <= shown
    assert shown <= classifiers and "Development Status" in " ".join(shown)
    extras = {"vllm", "llamacpp", "mlx", "tasks", "serve", "test"}
    assert set(found.get_all("Provides-Extra")) == extras
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


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # it downloads torch
def test_an_empty_environment_gets_all_that_commands_and_extras_need(wheel, tiny_model, tmp_path):
    """Installed with its dependencies from a package index; versions are those of constraints.txt."""
    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q"]
    pip += ["-c", REPOSITORY / "constraints.txt"]
    subprocess.run([*pip, f"quantkit[llamacpp,serve,tasks] @ {wheel.as_uri()}"], check=True)
    model, command = tiny_model("llama", name="tiny", tokenizer=True), python.with_name("quantkit")
    for words in (f"nf4 {model} -o made", f"eval {model} made --ctx 32 --limit 256 --json", "recipes list"):
        done = run(tmp_path, command, *words.split())
        assert done.returncode == 0, done.stderr
    packages = [name for engine in ("llama.cpp", "transformers") for name in ENGINES[engine].packages]
    look = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if not u.find_spec(n)])"
    assert run(tmp_path, python, "-I", "-c", look, *packages, "lm_eval").stdout == "[]\n"
