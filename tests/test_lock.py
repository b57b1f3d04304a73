"""uv.lock installs what quantkit is tested with."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lock_holds_the_tested_versions():
    pins = re.findall(r"^([\w.-]+)==([^\s;#]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    locked = {(normalized(package["name"]), package.get("version")) for package in packages}
    assert len(pins) > 100
    assert [f"{name}=={version}" for name, version in pins if (normalized(name), version) not in locked] == []


def test_the_lock_is_of_this_project_and_the_public_index():
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (package,) = [each for each in lock["package"] if each["name"] == "quantkit"]
    names = {normalized(re.match(r"[\w.-]+", each)[0]) for each in project["dependencies"]}
    assert {each["name"] for each in package["dependencies"]} == names
    assert {each["source"].get("registry") for each in lock["package"]} == {None, "https://pypi.org/simple"}
