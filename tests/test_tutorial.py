"""The tutorial: its commands name a public model, its samples the bundled one; the notebook's cells run."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from test_docs import ROOT, in_blocks

PUBLIC, BUNDLED = "Qwen/Qwen3-0.6B", "tests/data/demo-llama-6m"
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e-?\d+)?")
PAGE = ROOT / "docs" / "tutorial.md"


@pytest.fixture(scope="module")
def notebook():
    """scripts/notebook.py."""
    scripts = str(ROOT / "scripts")
    sys.path.insert(0, scripts)
    try:
        spec = importlib.util.spec_from_file_location("tutorial_notebook", f"{scripts}/notebook.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(scripts)
    return module


def outputs_of(cells: list[list[dict]]) -> list[str]:
    return [
        "".join(output.get("text") or output["data"]["text/plain"]) for outputs in cells for output in outputs
    ]


@pytest.mark.nightly
def test_the_cells_print_on_the_bundled_model_what_the_notebook_shows(
    notebook, demo_model, tmp_path, monkeypatch
):
    """Text and counts exactly, measured numbers to a quarter: they depend a little on the processor."""
    monkeypatch.chdir(tmp_path)
    Path(demo_model.name).symlink_to(demo_model)
    stored = [cell for cell in notebook.read()["cells"] if cell["cell_type"] == "code"]
    printed = outputs_of(notebook.run(stored, demo_model.name))
    shown = outputs_of([cell["outputs"] for cell in stored])
    assert len(shown) == 6 and [NUMBER.sub("#", text) for text in printed] == [
        NUMBER.sub("#", text) for text in shown
    ]
    for now, then in zip(printed, shown, strict=True):
        for line, kept in zip(now.splitlines(), then.splitlines(), strict=True):
            if not line.startswith(("| (noise floor)", "| model-w4")):  # differences near zero, extremes
                numbers = [float(number) for number in NUMBER.findall(kept)]
                assert [float(number) for number in NUMBER.findall(line)] == pytest.approx(numbers, rel=0.25)
    assert "**" not in printed[0] and "4.25 bits per weight" in printed[1]


def test_the_notebook_is_one_that_jupyter_opens(notebook):
    """Of format 4.5: ids, counts in order, and a statement whose model its outputs are of."""
    read = notebook.read()
    assert (read["nbformat"], read["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in read["cells"]}) == len(read["cells"])
    code = [cell for cell in read["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    first = "".join(read["cells"][0]["source"])
    assert PUBLIC in first and BUNDLED in first and "printed with the bundled model" in first
    assert f'MODEL = "{PUBLIC}"' in "".join(code[0]["source"])
    assert notebook.NOTEBOOK.stat().st_size < 20_000


def test_links_of_the_notebook_lead_to_pages(notebook):
    text = "".join("".join(cell["source"]) for cell in notebook.read()["cells"])
    found = re.findall(r"\]\(([^)#]+)", text)
    assert found and all((ROOT / "docs" / link).exists() for link in found)


def test_commands_name_a_public_model_and_samples_the_bundled_one():
    """A sample begins with `$` after a line that says on which model it was printed."""
    text = PAGE.read_text()
    fences = re.findall(r"([^\n]*)\n\n```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    samples = [(before, block) for before, block in fences if block.startswith("$ ")]
    assert len(samples) >= 2
    for before, block in samples:
        assert "Printed on the bundled model" in before and BUNDLED in block
    typed = [" ".join(words) for words in in_blocks(PAGE)]
    commands = "".join(block for _, block in fences if not block.startswith("$ "))
    assert BUNDLED not in commands
    assert sum(PUBLIC in command for command in typed) == 4
