"""Fixtures of all tests. Everything is tiny, seeded, made here or in the repository, and offline."""

import os

os.environ["OMP_WAIT_POLICY"] = "passive"  # as the command line has it: threads that wait take no core
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the command line does; servers that fork inherit it

import json
import re
import sys
from collections import namedtuple
from importlib.util import find_spec
from pathlib import Path

import failing
import forked
import pytest
import speed_of_tests
from stand_in_hub import StandInHub

from quantkit import cli
from quantkit.capacity import speed
from quantkit.cli.streams import uncollected

REPOSITORY = Path(__file__).parents[1]
Done = namedtuple("Done", "code out err")
OPTIONAL = ("xllamacpp", "bitsandbytes", "lm_eval", "matplotlib")  # without them tests are skipped


def pytest_sessionstart():
    """Where everything was installed to be tested (scripts/test), nothing may be skipped for want of it."""
    missing = [name for name in OPTIONAL if find_spec(name) is None]
    if os.environ.get("QUANTKIT_TEST_EVERYTHING") and missing:
        pytest.exit(f"{', '.join(missing)} is not installed, so tests would be skipped", returncode=1)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported meanwhile stays: to look for garbage there takes an eighth of the time."""
    with uncollected():
        return (yield)


def pytest_itemcollected(item):
    """scripts/test finds the files of the processor passes by searching for their mark."""
    if item.get_closest_marker("processor") and "mark.processor" not in item.path.read_text():
        raise pytest.UsageError(f"{item.path} must say mark.processor itself: scripts/test searches for it")


@pytest.fixture(scope="session", autouse=True)
def no_benchmark():
    """The speed of this machine is a constant: `plan` is as fast, and says the same, everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "of_machine", lambda dtype: speed_of_tests.SPEED)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """For torch, which the process that only hands out tests does not import."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def few_tokens(monkeypatch):
    """`quantkit auto` accepts as few tokens as a test can spare."""
    monkeypatch.setattr("quantkit.auto.job.LEAST_TOKENS", 1)


@pytest.fixture
def tiny_model(tmp_path):
    """`tiny_model("llama", num_hidden_layers=2)` -> folder of a new random checkpoint (see families.py).

    `tokenizer=True` adds the tiny tokenizer, `tokenizer="bos"` the one that begins texts with BOS.
    """
    import families

    def make(family: str, *, tokenizer: bool | str = False, name: str | None = None, **arguments) -> Path:
        folder = families.save_model(tmp_path / (name or family), family, **arguments)
        if tokenizer:
            families.save_tokenizer(folder, bos=tokenizer == "bos")
        return folder

    return make


@pytest.fixture
def talker(tiny_model):
    """`talker("gemma3")` -> folder of a tiny random model with tokenizer and chat template (see chats.py)."""
    import chats

    def make(family: str = "llama", template: str | None = chats.TEMPLATE, **arguments) -> Path:
        folder = tiny_model(family, tokenizer="bos", **arguments)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


@pytest.fixture
def quantkit(monkeypatch, capsys, tmp_path):
    """`quantkit("gptq", ...)` runs the console script in `tmp_path`: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):  # what --verbose sets is undone
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def run(*arguments) -> Done:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["quantkit", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Done(ended.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def make(quantkit):
    """`make("gptq", ...)` must succeed, quietly; what `--json` printed."""

    def run(*arguments) -> dict:
        done = quantkit(*arguments, "--json", "-q")
        said = re.sub(
            r"warning: \S+ instead of \S+, because \d+ columns .*\n", "", done.err
        )  # no tiny model fits
        assert (done.code, said) == (0, "")
        return json.loads(done.out)

    return run


@pytest.fixture
def refuse(quantkit):
    """`refuse(code, "gptq", ...)` must fail with two lines on stderr and nothing else: (error, hint)."""

    def run(code: int, *arguments) -> tuple[str, str]:
        done = quantkit(*arguments, "-q")
        lines = re.fullmatch(r"error: (\S.*)\nhint: (\S.*)\n", done.err)
        assert lines, done.err
        assert (done.code, done.out) == (code, "")
        return lines.groups()

    return run


@pytest.fixture
def program(tmp_path):
    """`program(text)` is an executable file."""

    def write(text: str) -> Path:
        path = tmp_path / "python"
        path.write_text(text)
        path.chmod(0o755)
        return path

    return write


@pytest.fixture(scope="session")
def forker(tmp_path_factory):
    """Starts commands in no time, whose calls can be let fail where there is a C compiler (see forked.py)."""
    library = failing.build(tmp_path_factory.mktemp("library")) if failing.compiler() else ""
    with forked.Server(LD_PRELOAD=library) as server:
        server.library = library
        yield server


@pytest.fixture
def hub_server():
    """An empty stand-in for the hub, running (see stand_in_hub.py)."""
    with StandInHub() as server:
        yield server


@pytest.fixture(scope="session")
def bnb():
    """bitsandbytes, the implementation that clients run."""
    return pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The trained demo model that the repository ships, read-only: copy it before changing it."""
    return REPOSITORY / "tests" / "data" / "demo-llama-6m"


@pytest.fixture(scope="session")
def short_demo(demo_model, tmp_path_factory) -> Path:
    """The first two of its six blocks: a third of the time, where their number says nothing."""
    import shutil

    import transformers

    folder = tmp_path_factory.mktemp("short") / demo_model.name
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model, num_hidden_layers=2, dtype="auto")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, folder)
    return folder


@pytest.fixture(scope="session")
def shared() -> Path:
    """Oracles, models and texts beside the repository; tests that need them are skipped without."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: oracles and larger models lie only there")
    return folder
