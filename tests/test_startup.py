"""What a command imports: no more than it uses. Each runs in a process of its own."""

import json
import os
import re
import subprocess
import sys

import pytest
import records
import speed_of_tests

from quantkit import cli
from quantkit.cli import commands
from quantkit.quantize import methods

RUN = """import json, sys
from quantkit.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["quantkit", *words]
    try:
        main()
    except SystemExit as done:
        assert not done.code, done.code
with open("modules.json", "w") as file:
    json.dump(sorted(sys.modules), file)
"""
LIBRARIES = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "huggingface_hub", "jinja2"}
MLX = "MLX has 2, 3, 4, 5, 6 or 8 bits"
RARE = {  # what only some inputs or an extra need
    "datasets", "pyarrow", "pandas", "sklearn", "jsonschema", "gguf",
    "matplotlib", "lm_eval", "bitsandbytes",
}  # fmt: skip


@pytest.fixture
def imported(tmp_path):
    """`imported(["nf4", ...])`: the modules that a process has imported when its commands have ended."""

    def run(*typed: list) -> set[str]:
        command = [sys.executable, "-c", RUN, json.dumps([[*map(str, words)] for words in typed])]
        environment = os.environ | speed_of_tests.variables(tmp_path)
        subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env=environment)
        return set(json.loads((tmp_path / "modules.json").read_text()))

    return run


def test_the_help_imports_no_command(imported):
    found = imported(["--help"])
    assert not found & (LIBRARIES | RARE | {"yaml", "pydantic"})
    assert {name for name in found if name.startswith("quantkit")} == {
        "quantkit", "quantkit.errors", "quantkit.quantize", "quantkit.quantize.methods", "quantkit.cli",
        "quantkit.cli.commands",
        "quantkit.cli.running",
        "quantkit.cli.ranks",
        "quantkit.cli.streams",
    }  # fmt: skip


def test_a_command_imports_no_other_command(imported):
    found = imported(["nf4", "--help"])
    assert not found & (LIBRARIES | RARE)
    assert {"quantkit.quantize.methods.nf4", "quantkit.cli.quantize"} <= found
    assert not found & {"quantkit.quantize.methods.gguf", "quantkit.cli.eval", "quantkit.cli.plan"}


def test_commands_that_read_no_weights_load_nothing(imported, make, demo_model, tiny_model, tmp_path):
    packed, made = tmp_path / "packed", tmp_path / "m.gguf"
    make("gptq", tiny_model("llama", tokenizer=True), "-o", packed, "--solver", "rtn", "--group-size", 32)
    make("gguf", tmp_path / "llama", "-o", made, "-t", "Q8_0", "--solver", "rtn", "--imatrix", "none")
    (tmp_path / "result.json").write_text(json.dumps(records.record()))
    folders = [[command, path] for path in (demo_model, packed) for command in ("plan", "inspect")]
    assert not imported(*folders) & (LIBRARIES | RARE)
    of_files = ["plan", made], ["inspect", made], ["report", "result.json"]
    assert not imported(*of_files) & {"torch", "transformers"}


def test_a_job_imports_nothing_rare(imported, tiny_model):
    few = ["--group-size", "32", "--samples", "2", "--seqlen", "32", "--transform", "none", "--refine", "0"]
    found = imported(["gptq", tiny_model("llama", tokenizer=True), "-o", "out", *few])
    assert {"torch", "transformers.modeling_utils", "quantkit.quantize.loop"} <= found
    assert not found & (RARE)


def test_every_summary_is_read_as_it_is():
    assert {name: methods.summary(name) for name in methods.available()} == {
        name: methods.load(name).__doc__ for name in methods.available()
    }


def test_the_list_of_commands_is_that_of_the_commands():
    for name in commands.names():
        command = commands.build(name)
        assert (command.name, command.help) == (name, commands.summary(name))


def test_what_cannot_be_is_refused_before_torch_is_imported(tiny_model, tmp_path):
    tiny_model("llama", name="tiny", hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
    for name in ("tiny-int8", "out"):
        (tmp_path / name).mkdir()
    single = "chat,imatrix,inspect,sample,serve,verify,gptq,run gptq-w4,auto --bpw 4,convert --to awq"
    typed = {f"{command} nope": "no such folder: nope" for command in single.split(",")}
    typed |= {
        "eval nope tiny": "no such folder: nope",
        "distill tiny nope": "no such folder: nope",
        "int8 tiny": "tiny-int8 exists",
        "awq tiny -o out": "out exists",
        "auto tiny --bpw 4 -o out": "out exists",
        "eval tiny --as rtn --device gpu": "'gpu' is not a device",
        "sample x --device gpu": "'gpu' is not a device",
        "run gptq-w4 x --set run.device=gpu": "'gpu' is not a device",
        "eval x --text y --threads 0": "--threads 0 is invalid",
        "verify x --threads 0": "--threads 0 is invalid",
        "serve x --dtype int9": "'int9' is not one of",
        "auto x --bpw 3 --ctx 3q": "--ctx 3q is invalid",
        "gptq out": "out holds no config.json",
        "gptq tiny --max-memory lots": "--max-memory 'lots' is not a size",
        "eval tiny --as rtn --max-kld x": "--max-kld 'x' is not a limit",
        "push tiny nonsense": "nonsense is not the name of a repository",
        "gptq tiny --bits 7 --layout mlx": MLX,
        "gptq tiny --head 7 --layout mlx": MLX,
        "awq tiny --group-size -1 --layout mlx": MLX,
    }
    code = """import sys; from quantkit.cli import main
for line in sys.stdin.read().splitlines():
    sys.argv = ["quantkit", *line.split()]
    try: main()
    except SystemExit as done: print("code", done.code, file=sys.stderr)
print("torch" in sys.modules, "transformers" in sys.modules)"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input="\n".join(typed), capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "False False\n"
    found = re.findall(r"^error: (.*)\nhint: .*\ncode (\d)$", done.stderr, re.MULTILINE)
    for (line, code), said in zip(found, typed.values(), strict=True):
        other = {"no such folder: nope": "3", "out holds no config.json": "3", MLX: "4"}
        assert said in line and code == other.get(said, "2")


@pytest.mark.parametrize("typed", ["eval m --text t --ctx 32k", "auto m --bpw 3 --ctx 32k"])
def test_a_context_is_read_with_its_suffix(typed):
    name, *arguments = typed.split()
    settings = cli.app.info.context_settings  # a command keeps the names of its first context's help
    assert commands.build(name).make_context(name, arguments, **settings).params["ctx"] == 32768


@pytest.mark.nightly
def test_threads_are_those_that_torch_will_read(tmp_path):
    code = (
        "import os; from quantkit.cli import main\ntry: main()\nfinally: print(os.getenv('OMP_NUM_THREADS'))"
    )
    command = [sys.executable, "-c", code, *"eval missing --text x --max-memory y --threads 3".split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "3\n"
