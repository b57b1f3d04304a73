"""What a command imports: no more than it uses. Each runs in a process of its own."""

import json
import subprocess
import sys

import pytest

from quantkit import methods
from quantkit.cli import commands
from quantkit.cli.stand_ins import deferred, standing_in

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
    "datasets", "pyarrow", "pandas", "scipy.optimize", "scipy.linalg", "sklearn", "jsonschema", "gguf",
    "matplotlib", "lm_eval", "bitsandbytes",
}  # fmt: skip
COMPILER = {"torch._dynamo.eval_frame", "torch._inductor", "torch.distributed.tensor", "torch.onnx"}
MARKDOWN = {"rich.markdown", "rich.traceback", "rich.syntax", "markdown_it", "pygments", "attr"}


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
    assert not found & (LIBRARIES | RARE | MARKDOWN | {"yaml", "pydantic"})
    assert {name for name in found if name.startswith("quantkit")} == {
        "quantkit", "quantkit.errors", "quantkit.methods", "quantkit.cli", "quantkit.cli.commands",
        "quantkit.cli.manners", "quantkit.cli.rendering", "quantkit.cli.stand_ins",
    }  # fmt: skip


def test_a_command_imports_no_other_command(imported):
    found = imported("nf4", "--help")
    assert not found & (LIBRARIES | RARE | MARKDOWN)
    assert {"quantkit.methods.nf4", "quantkit.cli.quantize"} <= found
    assert not found & {"quantkit.methods.gguf", "quantkit.cli.evaluate", "quantkit.cli.plan"}


def test_plan_loads_nothing(imported, demo_model):
    assert not imported("plan", demo_model) & ({"torch", "transformers"} | RARE | MARKDOWN)


@pytest.mark.parametrize("method", ["nf4", "gptq"])
def test_a_job_imports_neither_compiler_nor_datasets(imported, demo_model, method):
    small = ["--samples", "2", "--seqlen", "32"] if method == "gptq" else []
    found = imported(method, demo_model, "-o", "out", *small)
    assert {"torch", "transformers.modeling_utils", "quantkit.pipeline"} <= found
    assert not found & (RARE | COMPILER)


def test_every_summary_is_read_as_it_is():
    assert {name: methods.summary(name) for name in methods.available()} == {
        name: methods.load(name).SUMMARY for name in methods.available()
    }


def test_the_list_of_commands_is_that_of_the_commands():
    for name in commands.names():
        command = commands.build(name)
        assert (command.name, command.help) == (name, commands.summary(name))


@pytest.mark.parametrize("arguments", [["--help"], ["gptq", "--help"], ["recipes"]])
def test_help_is_what_typer_makes_of_it_with_all_of_rich(arguments):
    command = "import sys; from quantkit.cli import main; sys.argv[0] = 'quantkit'; main()"
    texts = [
        subprocess.run([sys.executable, "-c", before + command, *arguments], capture_output=True, text=True)
        for before in ("", "import typer.rich_utils; ")
    ]
    assert texts[0].stdout and texts[0].stdout == texts[1].stdout


# ---- stand-ins


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Two modules, `heavy_a` and `heavy_b`, that can be imported."""
    for name in ("heavy_a", "heavy_b"):
        (tmp_path / f"{name}.py").write_text("class Thing: size = 3\nother = 4\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield {name: deferred(name, "Thing") for name in ("heavy_a", "heavy_b")}
    for name in ("heavy_a", "heavy_b"):
        sys.modules.pop(name, None)


def test_a_name_is_imported_when_it_is_used(modules):
    with standing_in(modules):
        from heavy_a import Thing

        def takes(thing: Thing | None) -> None: ...

    assert "heavy_a" not in sys.modules
    assert Thing.size == 3 and type(Thing()).__module__ == "heavy_a"
    assert isinstance(Thing(), Thing)

    class Derived(Thing): ...

    assert Derived.size == 3


def test_asked_for_more_all_of_them_become_real(modules):
    with standing_in(modules):
        import heavy_a

        assert heavy_a.other == 4
        import heavy_b
    assert type(heavy_b.Thing) is type and sys.modules["heavy_b"] is heavy_b


def test_what_stays_serves_later_imports(modules):
    light = {"heavy_a": {"mark": lambda function: function}}
    with standing_in(light, staying=("heavy_a",)):
        pass
    import heavy_a

    assert heavy_a.mark(1) == 1 and heavy_a.other == 4
    assert sys.modules["heavy_a"] is not heavy_a and sys.modules["heavy_a"].other == 4


def test_what_is_imported_already_stays_as_it_is(modules):
    import heavy_a

    with standing_in(modules):
        assert sys.modules["heavy_a"] is heavy_a
    assert sys.modules["heavy_a"] is heavy_a
