"""`quantkit doctor`: what it finds, and that nothing it does not find breaks it."""

import json
import re
import shutil
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import torch

from quantkit import __version__
from quantkit.errors import EXIT_CODES
from quantkit.inspection import clients, doctor
from quantkit.models.machine import processor


@pytest.fixture(autouse=True)
def requirements(monkeypatch):
    """Those of a source tree, whatever is installed beside it."""
    wanted = ["torch>=2.6", "numpy>=1.26", "pytest>=8 ; extra == 'test'"]
    monkeypatch.setattr(metadata, "requires", lambda package: wanted)
    return wanted


def findings(record: dict) -> dict[str, dict]:
    return {row["name"]: row for rows in record["checks"].values() for row in rows}


def test_packages_that_transformers_needs_are_the_same_everywhere():
    """In the clients' table, which inspect, cards, chat and serve read; in doctor; in the how-to."""
    rules = {layout: of.get("transformers", []) for layout, of in clients.table()["rules"].items()}
    needs = {layout: {one for rule in of for one in rule.get("needs", ())} for layout, of in rules.items()}
    assert set().union(*needs.values()) <= doctor.OPTIONAL.keys() | {"gguf"}  # which quantkit itself needs
    page = (Path(__file__).parents[1] / "docs/howto/transformers.md").read_text()
    always = set(re.search(r"pip install transformers (\w+) bitsandbytes", page).groups())
    rows = re.findall(r"^\| `(\w+)`.*? \| `([\w -]+)` \|$", page, re.M)
    said = [(method, {*packages.split()} | always) for method, packages in rows]
    layouts = ["bitsandbytes", "gptq", "awq", "compressed-tensors"]
    assert said == [
        (method, needs[layout] | always) for (method, _), layout in zip(said, layouts, strict=True)
    ]


@pytest.mark.processor
def test_it_tells_what_is_here(make):
    record = make("doctor")
    rows = findings(record)
    assert record["schema"] == "quantkit.doctor/1" and record["quantkit"] == __version__
    assert record["exit_codes"] == {str(code): words for code, words in EXIT_CODES.items()}
    assert list(record["checks"]) == ["program", "needed", "machine", "hub", "optional"]
    assert [row["name"] for row in record["checks"]["needed"]] == ["numpy", "torch"]
    assert rows["torch"] == {"name": "torch", "value": metadata.version("torch"), "ok": True, "note": ""}
    assert rows["cpu"]["value"].startswith(f"{psutil.cpu_count()} core")
    note = "computes in bfloat16" if processor.has_bfloat16() else "no bfloat16: --dtype auto is float32"
    assert rows["cpu"]["note"] == note
    assert ("cuda" in rows) != torch.cuda.is_available()
    assert {row["name"] for row in record["checks"]["optional"]} == doctor.OPTIONAL.keys()
    assert rows["hub"]["value"] == "not contacted" and "HF_HUB_OFFLINE" in rows["hub"]["note"]
    assert "hf_" not in json.dumps(record["checks"]["hub"])


def test_for_people(quantkit):
    done = quantkit("doctor")
    assert done.code == 0 and done.err == "" and "\x1b" not in done.out
    assert f"\n  torch              {metadata.version('torch')}\n" in done.out


def test_what_is_absent_or_too_old_is_a_problem(quantkit, requirements):
    requirements[:] = ["torch>=99", "no-such-package>=1"]
    done = quantkit("doctor")
    assert done.code == 1 and "! no-such-package    not installed" in done.out
    version = metadata.version("torch")
    assert done.err.splitlines()[0] == (
        f"error: this installation is broken: no-such-package not installed, torch {version}"
    )
    assert "quantkit needs torch>=99" in done.err
    record = json.loads(quantkit("doctor", "--json").out)
    assert record["error"]["exit_code"] == 1 and findings(record)["torch"]["ok"] is False


def test_a_check_that_fails_is_a_line(quantkit, monkeypatch):
    def broken():
        raise OSError("no such sensor")

    monkeypatch.setattr(psutil, "virtual_memory", broken)
    done = quantkit("doctor")
    assert "! memory             unknown (OSError: no such sensor)" in done.out
    assert done.code == 1 and "memory unknown" in done.err
    assert "\n  disk here " in done.out and "\noptional\n" in done.out


def test_a_source_tree_has_no_requirements_to_look_at(make, monkeypatch):
    def absent(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "requires", absent)
    (row,) = make("doctor")["checks"]["needed"]
    assert row["ok"] is None and "source tree" in row["note"]


def test_disks_are_those_of_output_and_cache(make, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(5e9, 3e9, 2e9))
    rows = findings(make("doctor"))
    assert rows["disk here"]["value"] == rows["hub cache"]["value"] == "2.00 GB of 5.00 GB free"


def test_a_hub_that_does_not_answer_is_no_failure(quantkit, monkeypatch):
    """Whoever works offline is told, and not refused."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    done = quantkit("doctor")
    assert done.code == 0 and "! hub                does not answer (http://127.0.0.1:9: " in done.out


def test_a_hub_that_answers(make, monkeypatch, hub_server):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub_server.url)
    row = findings(make("doctor"))["hub"]
    assert (row["value"], row["ok"], row["note"]) == ("answers", True, hub_server.url)
    assert [method for method, *_ in hub_server.seen] == ["HEAD"]
