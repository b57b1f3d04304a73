"""Dockerfile and compose.yaml: built and run where docker runs; elsewhere their parts are looked up."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml
from test_docs import ROOT, resolve

from quantkit import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
VARIABLE = re.compile(r"\$\{\w+:-([^}]*)\}")


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]


def of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def copied() -> list[str]:
    return [source for line in of("COPY") for source in line.split()[:-1]]


def command(words: list[str]) -> dict:
    """The parsed options of a quantkit command."""
    found, context, rest = resolve([VARIABLE.sub(r"\1", word) for word in words])
    found.parse_args(context, rest)
    return context.params


def test_the_image_runs_the_installed_command_as_no_root():
    assert json.loads(of("ENTRYPOINT")[0]) == ["quantkit"] and "quantkit" in PROJECT["project"]["scripts"]
    assert json.loads(of("CMD")[0]) == ["--help"]
    assert of("USER") == ["1000:1000"] and of("WORKDIR")[-1] == of("VOLUME")[0] == "/models"
    text = (ROOT / "Dockerfile").read_text()
    extras = re.search(r"Extras of quantkit.*?: (.*)\.", text)[1].split(", ")
    assert {"llamacpp", "vllm"} < set(extras) <= PROJECT["project"]["optional-dependencies"].keys()
    examples = re.findall(r"^#     docker run .* quantkit(?::cuda)? (.*)$", text, re.MULTILINE)
    assert len(examples) == 2 and all(command(line.split()) for line in examples)


@pytest.mark.nightly
def test_what_is_copied_builds_the_whole_wheel(tmp_path):
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in ignored and sorted(copied()) == sorted(line[1:] for line in ignored if line[:1] == "!")
    context, wheels = tmp_path / "context", {}
    context.mkdir()
    for source in copied():
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, context / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, context)
    for place in (context, ROOT):
        out = tmp_path / f"wheel of {place.name}"
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, place]
        subprocess.run(build, check=True, capture_output=True)
        packed = zipfile.ZipFile(next(out.iterdir()))
        wheels[place] = {entry.filename: entry.CRC for entry in packed.infolist()}
    assert wheels[context] == wheels[ROOT]


def test_compose_quantizes_then_serves_the_same_file():
    assert COMPOSE.keys() == {"services", "volumes"} and COMPOSE["services"].keys() == {"quantize", "serve"}
    quantize, serve = COMPOSE["services"]["quantize"], COMPOSE["services"]["serve"]
    arguments = {line.partition("=")[0] for line in of("ARG")}
    assert quantize["build"].keys() == {"context", "args"} and quantize["build"]["args"].keys() <= arguments
    assert serve["image"] == quantize["image"] and "build" not in serve
    assert serve["depends_on"] == {"quantize": {"condition": "service_completed_successfully"}}
    for service in (quantize, serve):
        assert service["volumes"] == [f"models:{of('VOLUME')[0]}"] and "models" in COMPOSE["volumes"]
    made = command(quantize["command"])
    assert made["model"] == "Qwen/Qwen3-0.6B" and made["resume"] is True
    served = command(serve["command"])
    assert str(made["output"]) == served["model"]
    assert (served["host"], served["port"]) == ("0.0.0.0", 8000)
    assert serve["ports"] == ["127.0.0.1:8000:8000"] and of("EXPOSE") == ["8000"]


def test_hadolint_finds_nothing():
    if not (hadolint := shutil.which("hadolint")):
        pytest.skip("hadolint is not installed")
    subprocess.run([hadolint, ROOT / "Dockerfile"], check=True)


@pytest.mark.nightly
def test_the_image_is_built_and_runs():
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no docker daemon runs here")
    subprocess.run(["docker", "build", "-q", "-t", "quantkit:test", ROOT], check=True)
    run = ["docker", "run", "--rm", "quantkit:test"]
    version = subprocess.run([*run, "--version"], check=True, capture_output=True, text=True).stdout
    assert version == f"quantkit {__version__}\n"
    subprocess.run([*run, "recipes", "list"], check=True)
