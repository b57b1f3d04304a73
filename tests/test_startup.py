"""What a command imports: no more than it uses. Each runs in a process of its own."""

import json
import subprocess
import sys

import pytest

from quantkit.cli import commands
from quantkit.quantize import methods

RUN = """import json, sys
from quantkit.cli import main
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
with open("modules.json", "w") as file:
    json.dump(sorted(sys.modules), file)
"""
LIBRARIES = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "huggingface_hub", "jinja2"}
RARE = {  # what only some inputs or an extra need
    "datasets", "pyarrow", "pandas", "sklearn", "jsonschema", "gguf",
    "matplotlib", "lm_eval", "bitsandbytes",
}  # fmt: skip


@pytest.fixture
def imported(tmp_path):
    """`imported("nf4", ...)`: the modules that the command has imported when it ends."""

    def run(*arguments) -> set[str]:
        command = [sys.executable, "-c", RUN, *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
        return set(json.loads((tmp_path / "modules.json").read_text()))

    return run


def test_the_help_imports_no_command(imported):
    found = imported("--help")
    assert not found & (LIBRARIES | RARE | {"yaml", "pydantic"})
    assert {name for name in found if name.startswith("quantkit")} == {
        "quantkit", "quantkit.errors", "quantkit.quantize", "quantkit.quantize.methods", "quantkit.cli",
        "quantkit.cli.commands",
        "quantkit.cli.running",
        "quantkit.cli.ranks",
        "quantkit.cli.streams",
    }  # fmt: skip


def test_a_command_imports_no_other_command(imported):
    found = imported("nf4", "--help")
    assert not found & (LIBRARIES | RARE)
    assert {"quantkit.quantize.methods.nf4", "quantkit.cli.quantize"} <= found
    assert not found & {"quantkit.quantize.methods.gguf", "quantkit.cli.evaluate", "quantkit.cli.plan"}


def test_plan_loads_nothing(imported, demo_model):
    assert not imported("plan", demo_model) & ({"torch", "transformers"} | RARE)


def test_a_job_imports_nothing_rare(imported, demo_model):
    few = ["--samples", "2", "--seqlen", "32", "--transform", "none", "--refine", "0"]
    found = imported("gptq", demo_model, "-o", "out", *few)
    assert {"torch", "transformers.modeling_utils", "quantkit.quantize.loop"} <= found
    assert not found & (RARE)


def test_every_summary_is_read_as_it_is():
    assert {name: methods.summary(name) for name in methods.available()} == {
        name: methods.load(name).SUMMARY for name in methods.available()
    }


def test_the_list_of_commands_is_that_of_the_commands():
    for name in commands.names():
        command = commands.build(name)
        assert (command.name, command.help) == (name, commands.summary(name))
