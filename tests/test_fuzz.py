"""A few changed files of every kind that strangers write (see hostile.py): nothing but QuantkitError comes
out, within 512 MB. `scripts/reliability.py fuzz` tries as many as there is time for; what it found is in
`FOUND`, by the number that made it, so that it stays mended."""

import json
import multiprocessing
import resource
import sys
from pathlib import Path

import hostile
import pytest

from quantkit import cli
from quantkit.errors import QuantkitError

EACH = 3  # inputs of a kind
MEMORY = 512 << 20
FOUND = {  # kind -> numbers of inputs that once ended in a traceback, an abort or a message without end
    "headers": [97, 1521, 1799],
    "tensors": [10, 22, 23, 24, 28, 34, 106, 176, 203, 328, 574],
    "index": [916, 1124],
    "config": [3, 480, 579, 1870, 1902, 1964],
    "quantization": [1044, 6147, 100053, 100766, 102440, 4027784],
    "tokenizer": [5719, 101937, 201036, 4235649],
    "gguf": [200450],
    "imatrix": [],
    "recipe": [96],
    "calibration": [5900, 4031806, 4046380],
    "template": [22, 80, 241],
    "result": [2257, 5848, 5915],
    "manifest": [884, 101561],
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("samples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)

        def command(*typed: str) -> int:
            patch.setattr(sys, "argv", ["quantkit", *typed])
            out = open(place / "result.json" if typed[0] == "eval" else "/dev/null", "w")
            with pytest.raises(SystemExit) as ended, out, patch.context() as quiet:
                quiet.setattr(sys, "stdout", out)
                cli.main()
            return ended.value.code or 0

        return hostile.prepare(place, command)


def read_all(samples: Path, place: Path, kind: str, numbers: list[int], pipe) -> None:
    """In a process of its own, whose memory is limited."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    for number in numbers:
        said = None
        (one := place / str(number)).mkdir()
        try:
            hostile.TARGETS[kind].run(samples, one, number)
        except QuantkitError as error:
            said = f"{len(error.message)} characters" if len(error.message) > 4000 else None
        except BaseException as error:
            said = repr(error)[:500]
        pipe.send((number, said))


@pytest.mark.parametrize("kind", hostile.TARGETS)
def test_only_errors_for_people_come_out(samples, tmp_path, kind):
    numbers = list(dict.fromkeys([*range(EACH), *FOUND[kind]]))
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(False)
    process = context.Process(target=read_all, args=(samples, tmp_path, kind, numbers, theirs))
    process.start()
    theirs.close()
    outcomes = {}
    try:
        while len(outcomes) < len(numbers):
            number, said = ours.recv()
            outcomes[number] = said
    except EOFError:  # the process ended by itself
        outcomes[numbers[len(outcomes)]] = "ends the process"
    process.join(60)
    process.kill()
    assert {number: said for number, said in outcomes.items() if said} == {}
    assert len(outcomes) == len(numbers)


def test_every_input_can_be_made_again(samples, tmp_path, monkeypatch):
    """By its number alone."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(hostile, "_opened", lambda path, deep: None)
        monkeypatch.setattr(hostile, "_planned", lambda path: None)
        hostile.TARGETS["config"].run(samples, tmp_path / name, 12)
    made = [(tmp_path / name / "model" / "config.json").read_bytes() for name in ("a", "b")]
    assert made[0] == made[1] != (samples / "plain" / "config.json").read_bytes()
    assert json.loads((samples / "result.json").read_text())["schema"].startswith("quantkit.eval/")
