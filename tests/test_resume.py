"""A job stopped at any moment and resumed writes the bytes that an uninterrupted one writes.

Jobs run in processes forked from a server that has torch imported already, so that a kill is a real
one and costs no start. `FAULTS` are what such a process does to itself on the way.
"""

import json
import multiprocessing
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import families
import forked
import pytest
import torch
import yaml

from quantkit import cli
from quantkit.models.files import safetensors_folder
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize import job as jobs
from quantkit.quantize import loop
from quantkit.quantize.outputs import finish
from quantkit.quantize.outputs import folder as folder_output
from quantkit.quantize.staging import blocks as staged_blocks
from quantkit.quantize.staging import folder as staging

BLOCKS = 4
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": BLOCKS}
OPTIONS = "-o out --group-size 64 --samples 6 --seqlen 32 --batch-size 2 --threads 1".split()
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([__name__, *forked.KNOWN])
assert loop  # imported here for the server's sake


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, the timings aside."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != folder_output.TIMINGS}


# ---- processes and what befalls them


def die(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(module, name: str, action, call: int = 1) -> None:
    """Do `action` just before the `call`-th call of a function; 0: before every call."""
    whole, calls = getattr(module, name), []

    def replaced(*arguments, **options):
        calls.append(name)
        if call in (0, len(calls)):
            action(*arguments, **options)
        return whole(*arguments, **options)

    setattr(module, name, replaced)


def pause(*_, **__) -> None:
    time.sleep(0.06)


def slow() -> None:
    """Waits where a kill could do harm: between record and tensors, before the rename, in the merge."""
    for module, name in [(staged_blocks, "save_file"), (os, "replace"), (safetensors_folder, "write_file")]:
        before(module, name, pause, 0)
    before(folder_output, "_write_json", pause, 0)
    before(finish, "_verify", pause, 0)


def torn() -> None:
    """Half of a block's tensors are written."""

    def half(tensors, path, **options):
        path.write_bytes(b"\x08" * 1000)
        die()

    before(staged_blocks, "save_file", half, 2)


def swallowed(call: int = 2) -> None:
    """What torch makes of an interrupt while a tensor is read: seen in one of a hundred."""

    def interrupt(*_, **__):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape of object type 'UntypedStorage'") from None

    before(Skeleton, "load_block", interrupt, call)


def hashed(seconds: float, kill: bool = True) -> None:
    """The source counts as large, its hash is known only after a while, and the second block is the last."""
    jobs.HASHED_BESIDE = 0
    before(Checkpoint, "sha256", lambda *_: time.sleep(seconds))
    before(staging.Staging, "write_block", lambda *_: time.sleep(1), 1)
    if kill:
        before(staging.Staging, "write_block", die, 2)


FAULTS = {
    "hashed early": lambda: hashed(0.2),
    "hashed late": lambda: hashed(60),
    "hashed beside": lambda: hashed(0.2, kill=False),
    "slow": slow,
    "swallowed": swallowed,
    "swallowed first": lambda: swallowed(1),
    "torn": torn,
    "next": lambda: before(staging.Staging, "write_block", die, 2),
    "config": lambda: before(folder_output, "_write_json", die),
    "card": lambda: before(folder_output.model_card, "render", die),
    "publish": lambda: before(staging.Staging, "publish", die),
    "first rename": lambda: before(os, "rename", die),
    "second rename": lambda: before(os, "rename", die, 2),
    "clean": lambda: before(staging, "_remove_staged", die),
}


def child(folder: Path, arguments: list[str], fault: str | None) -> None:
    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    if fault:
        FAULTS[fault]()
    sys.argv = ["quantkit", *arguments]
    cli.main()


def start(folder: Path, arguments: list, fault: str | None = None):
    folder.mkdir(exist_ok=True)
    process = SERVER.Process(target=child, args=(folder, [*map(str, arguments)], fault), daemon=True)
    process.start()
    return process


def run(folder: Path, arguments: list, fault: str | None = None) -> int:
    """The exit code of a job; negative: the signal that ended it."""
    process = start(folder, arguments, fault)
    process.join()
    return process.exitcode


def wait_for(path: Path, process) -> None:
    while not path.exists():
        assert process.is_alive()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with two models, two texts, and `reference/out`, a slow job's uninterrupted result."""
    folder = tmp_path_factory.mktemp("workplace")
    for name, seed in [("model", 0), ("other", 1)]:
        families.save_tokenizer(families.save_model(folder / name, "llama", seed=seed, **SIZES))
        (folder / f"{name}.txt").write_text("\n".join(families.sentences(seed=seed)))
    with pytest.MonkeyPatch.context() as patch:  # for the server, which begins with the first job
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setenv("OMP_WAIT_POLICY", "passive")
        assert run(folder / "reference", job(folder), "slow") == 0
    return folder


@pytest.fixture(scope="module")
def reference(workplace) -> dict[str, bytes]:
    return contents(workplace / "reference" / "out")


def job(workplace: Path, model: str = "model", text: str = "model.txt") -> list:
    return ["gptq", workplace / model, *OPTIONS, "--calibration", workplace / text]


def recipe_job(workplace: Path, folder: Path) -> list:
    """The same from a recipe, partly overruled."""
    calibration = {"calibration": str(workplace / "model.txt"), "samples": 128, "seqlen": 32}
    recipe = {"method": "gptq", "model": str(workplace / "model"), "output": "out"}
    recipe |= {"quant": {"group_size": 32}, "calibration": calibration, "run": {"threads": 1}}
    (folder / "mine.yaml").write_text(yaml.safe_dump(recipe))
    settings = ["quant.group_size=64", "calibration.samples=6"]
    return ["run", "mine.yaml", "--set", settings[0], "--set", settings[1], "--batch-size", 2]


@pytest.fixture
def quantkit(monkeypatch, capsys, tmp_path):
    """Runs the command line in this process, in `tmp_path`: exit code and stderr, which is left quiet."""
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["quantkit", *map(str, arguments), "-q"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, capsys.readouterr().err

    yield invoke
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def one_block(workplace) -> Path:
    """What a killed job leaves after one block of four."""
    assert run(workplace / "staged", job(workplace), "next") == -signal.SIGKILL
    return workplace / "staged" / "out.partial"


@pytest.fixture
def staged(one_block, tmp_path) -> Path:
    """A copy of it in the folder of the test."""
    copy = tmp_path / "out.partial"
    copy.mkdir()
    for name, content in contents(one_block).items():
        (copy / name).write_bytes(content)
    return copy


# ---- kills: tests/test_stops.py sends them at every step of every method, scripts/kills.py at random


@pytest.mark.parametrize(
    ("fault", "blocks", "left"),
    [
        ("torn", 1, "block-00001.tmp"),
        ("config", BLOCKS, "output/tokenizer.json"),
        ("card", BLOCKS, "output/quantkit-timings.json"),
        ("publish", BLOCKS, "output/README.md"),
    ],
)
def test_killed_at_the_worst_moments(workplace, reference, tmp_path, fault, blocks, left):
    partial = tmp_path / "out.partial"
    assert run(tmp_path, job(workplace), fault) == -signal.SIGKILL
    assert not (tmp_path / "out").exists() and (partial / left).exists()
    assert len(list(partial.glob("block-*.safetensors"))) == blocks
    assert run(tmp_path, [*job(workplace), "--resume"]) == 0
    assert contents(tmp_path / "out") == reference
    assert f"resuming: {blocks} of {BLOCKS} blocks" in (tmp_path / "log").read_text()
    assert not partial.exists()


def test_killed_after_every_block(workplace, reference, tmp_path):
    """Each run adds one block to those before it: nothing is computed twice."""
    for done in range(1, BLOCKS):
        assert run(tmp_path, [*job(workplace), "--resume"], "next") == -signal.SIGKILL
        assert len(list(tmp_path.glob("out.partial/block-*.safetensors"))) == done
    assert run(tmp_path, [*job(workplace), "--resume"], "next") == 0
    assert contents(tmp_path / "out") == reference


@pytest.mark.parametrize(
    ("fault", "place"), [("first rename", "out"), ("second rename", "out.partial/replaced")]
)
def test_killed_while_replacing_an_output(workplace, reference, tmp_path, fault, place):
    """The old output is there, or between the renames in the staging folder, until the new one is."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("old")
    assert run(tmp_path, [*job(workplace), "--overwrite"], fault) == -signal.SIGKILL
    assert contents(tmp_path / place) == {"config.json": b"old"}
    assert contents(tmp_path / "out.partial" / "output") == reference
    if place == "out":
        assert run(tmp_path, [*job(workplace), "--resume"]) == 2
        assert contents(tmp_path / place) == {"config.json": b"old"}
    assert run(tmp_path, [*job(workplace), "--resume", "--overwrite"]) == 0
    assert contents(tmp_path / "out") == reference
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "out"]


def test_killed_with_the_output_in_place(workplace, reference, tmp_path):
    """The output is whole; what is left of the staging folder goes with the next run that may replace it."""
    assert run(tmp_path, job(workplace), "clean") == -signal.SIGKILL
    assert contents(tmp_path / "out") == reference
    assert run(tmp_path, [*job(workplace), "--resume"]) == 2
    (tmp_path / "out.partial" / "block-00003.json").unlink()  # the folder's removal was cut short
    assert run(tmp_path, [*job(workplace), "--resume", "--overwrite"]) == 0, (tmp_path / "log").read_text()
    assert contents(tmp_path / "out") == reference
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "out"]


@pytest.mark.parametrize(
    ("fault", "more"),
    [("slow", ["--overwrite"]), ("swallowed", []), ("swallowed first", []), ("slow", None)],
)
def test_interrupted_by_hand(workplace, reference, tmp_path, fault, more):
    """What the hint says can be pasted, whatever the command was."""
    if more:
        (tmp_path / "out").mkdir()
    arguments = recipe_job(workplace, tmp_path) if more is None else [*job(workplace), *more]
    process = start(tmp_path, arguments, fault)
    if fault == "slow":
        wait_for(tmp_path / "out.partial" / "block-00000.safetensors", process)
        os.kill(process.pid, signal.SIGINT)
    process.join()
    log = (tmp_path / "log").read_text()
    assert process.exitcode == 130, log
    *_, error, hint = log.splitlines()
    none = "no " * (fault == "swallowed first")
    assert error == f"error: interrupted; {none}finished blocks are kept in out.partial"
    command, *arguments = shlex.split(hint.removeprefix("hint: continue with: "))
    assert command == "quantkit" and arguments[-1] == "--resume"
    assert run(tmp_path, arguments) == 0, (tmp_path / "log").read_text()
    assert contents(tmp_path / "out") == reference
    assert not (tmp_path / "out.partial").exists()


# ---- what may be resumed, and with what


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("--damp 0.02", ["--damp (0.01 there, 0.02 here)"]),
        ("--solver rtn", ["--solver (gptq there, rtn here)", "calibration text (one there, none here)"]),
        ("--exclude o_proj", ["--exclude (none there, o_proj here)"]),
        ("--max-shard-gb 1", ["--max-shard-gb (5.0 there, 1.0 here)"]),
        ("--seed 1", ["--seed (0 there, 1 here)"]),
        ("--samples 5", ["--samples (6 there, 5 here)"]),
        ("--seqlen 16", ["--seqlen (32 there, 16 here)"]),
        ("--dtype bfloat16", ["--dtype (float32 there, bfloat16 here)"]),
        ("--batch-size 3", ["--batch-size (2 there, 3 here)"]),
        ("--sequential repeat", ["--sequential (suspend there, repeat here)"]),
        ("--threads 2", ["--threads (1 there, 2 here)"]),
    ],
)
def test_another_job_is_refused(workplace, quantkit, staged, changed, named):
    before = contents(staged)
    code, said = quantkit(*job(workplace), *changed.split(), "--resume")
    assert code == 2 and said.startswith("error: out.partial holds another job; different: ")
    assert all(words in said for words in named), said
    assert contents(staged) == before


@pytest.mark.parametrize(
    ("model", "text", "named"),
    [("other", "model.txt", "files of the model"), ("model", "other.txt", "calibration tokens")],
)
def test_another_model_or_text_is_refused(workplace, quantkit, staged, model, text, named):
    code, said = quantkit(*job(workplace, model, text), "--resume")
    assert code == 2 and re.search(rf"different: .*{named} \(\w{{12}}… there, \w{{12}}… here\)", said)


def test_another_version_is_refused(workplace, quantkit, staged):
    path = staged / "fingerprint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"torch": "0.1"}))
    code, said = quantkit(*job(workplace), "--resume")
    assert code == 2 and f"version of torch (0.1 there, {torch.__version__} here)" in said


@pytest.mark.parametrize("left", [None, "lock", "fingerprint.json.tmp"])
def test_nothing_staged_starts_afresh(workplace, reference, quantkit, tmp_path, left):
    if left:  # killed before the fingerprint was written
        (tmp_path / "out.partial").mkdir()
        (tmp_path / "out.partial" / left).write_text("?")
    said = "warning: nothing is staged for out: it begins at the first block\n"
    assert quantkit(*job(workplace), "--resume") == (0, said)
    assert contents(tmp_path / "out") == reference


def test_how_the_first_run_ran_is_adopted(workplace, tmp_path):
    how = "--batch-size 3 --threads 2 --sequential repeat --dtype bfloat16".split()
    plain = ["gptq", workplace / "model", *OPTIONS[:-4], "--calibration", workplace / "model.txt"]
    assert run(tmp_path / "whole", [*plain, *how]) == 0
    assert run(tmp_path / "killed", [*plain, *how], "next") == -signal.SIGKILL
    assert run(tmp_path / "killed", [*plain, "--resume"]) == 0
    execution = json.loads((tmp_path / "killed/out/quantkit.json").read_text())["job"]["execution"]
    assert execution == {
        "dtype": "bfloat16", "device": "cpu", "batch_size": 3, "sequential": "repeat", "threads": 2,
    }  # fmt: skip
    assert contents(tmp_path / "killed/out") == contents(tmp_path / "whole/out")


@pytest.mark.parametrize("asked", ["fp8 --static --kv-cache", "fp4 --activations"])
def test_jobs_of_other_kinds_resume(workplace, tmp_path, asked):
    """With scales of inputs, keys and values among what is staged."""
    method, *flags = asked.split()
    text = ["--calibration", workplace / "model.txt", "--samples", 6, "--seqlen", 32]
    words = [method, workplace / "model", "-o", "out", "--threads", 1, *flags, *text]
    assert run(tmp_path / "whole", [*words, "--json", "-q"]) == 0
    told = json.loads((tmp_path / "whole/log").read_text())
    assert (told["schema"], told["linears"]) == ("quantkit.job/1", 7 * BLOCKS)
    assert run(tmp_path / "killed", words, "next") == -signal.SIGKILL
    assert run(tmp_path / "killed", [*words, "--resume"]) == 0
    assert f"resuming: 1 of {BLOCKS} blocks" in (tmp_path / "killed/log").read_text()
    assert contents(tmp_path / "killed/out") == contents(tmp_path / "whole/out")


def flip(path: Path) -> None:
    """A bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGE = {
    "a bit of its tensors": lambda folder: flip(folder / "block-00000.safetensors"),
    "a record that is a list": lambda folder: (folder / "block-00000.json").write_text("[]"),
    "a record that is not JSON": lambda folder: (folder / "block-00000.json").write_text('{"linears": '),
    "a record of nothing": lambda folder: (folder / "block-00000.json").write_text('{"linears": []}'),
    "a record of files elsewhere": lambda folder: (folder / "block-00000.json").write_text(
        '{"linears": [], "files": {"../../config.json": ""}}'
    ),
    "a record without sums": lambda folder: (folder / "block-00000.json").write_text(
        '{"linears": [], "files": {"none": null}}'
    ),
    "no record": lambda folder: (folder / "block-00000.json").unlink(),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_staged_block_that_was_damaged_is_made_again(workplace, reference, quantkit, staged, what):
    DAMAGE[what](staged)
    code, said = quantkit(*job(workplace), "--resume")
    assert code == 0, said
    assert "warning: of the staged blocks, these are damaged and made again: 1\n" in said
    assert contents(staged.parent / "out") == reference


@pytest.mark.parametrize(("late", "resumed"), [("early", 1), ("late", 0)])
def test_a_source_that_is_hashed_beside_the_job(workplace, reference, tmp_path, late, resumed):
    """Blocks staged before the hash was known could be another source's: they are made again."""
    assert run(tmp_path, job(workplace), f"hashed {late}") == -signal.SIGKILL
    fingerprint = json.loads((tmp_path / "out.partial/fingerprint.json").read_text())
    assert (fingerprint["source_sha256"] is None) == (late == "late")
    assert run(tmp_path, [*job(workplace), "--resume"], "hashed beside") == 0
    log = (tmp_path / "log").read_text()
    assert f"resuming: {resumed} of {BLOCKS} blocks" in log if resumed else "resuming" not in log
    assert contents(tmp_path / "out") == reference


@pytest.mark.parametrize("mode", ["--resume", "--overwrite"])
def test_one_process_at_a_time(workplace, reference, quantkit, tmp_path, mode):
    process = start(tmp_path, job(workplace), "slow")
    wait_for(tmp_path / "out.partial" / "block-00000.safetensors", process)
    code, said = quantkit(*job(workplace), mode)
    assert code == 1 and "out.partial is in use by another process" in said
    process.join()
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    assert contents(tmp_path / "out") == reference


# ---- the same twice


def test_two_runs_write_the_same_bytes(workplace, reference, quantkit, tmp_path):
    """Only the timings differ, and no other file has any."""
    assert quantkit(*job(workplace)) == (0, "")
    assert contents(tmp_path / "out") == reference
    seconds = [
        json.loads((folder / "out" / folder_output.TIMINGS).read_text())["seconds"]
        for folder in (tmp_path, workplace / "reference")
    ]
    assert seconds[0].keys() == seconds[1].keys() and seconds[0] != seconds[1]
    assert not any(b"seconds" in content for name, content in reference.items() if name != "tokenizer.json")


def test_both_ways_to_gather_statistics_write_the_same_weights(workplace, reference, quantkit, tmp_path):
    assert quantkit(*job(workplace), "--sequential", "repeat") == (0, "")
    made = contents(tmp_path / "out")
    assert [name for name in reference if made[name] != reference[name]] == ["quantkit.json"]
    manifests = [json.loads(content["quantkit.json"]) for content in (made, reference)]
    assert [manifest["job"]["execution"].pop("sequential") for manifest in manifests] == ["repeat", "suspend"]
    assert manifests[0] == manifests[1]


# ---- the disk


@pytest.mark.parametrize("method", ["gptq", "nf4"])
def test_only_blocks_that_took_a_while_wait_for_the_disk(workplace, quantkit, monkeypatch, method):
    """Others are made again as fast; what the disk has of them their sums tell."""
    waited: list[str] = []
    sync = staged_blocks.sync
    monkeypatch.setattr(staged_blocks, "sync", lambda path: (waited.append(path.name), sync(path)))
    arguments = job(workplace)[1:] if method == "gptq" else [workplace / "model", "-o", "out"]
    assert quantkit(method, *arguments) == (0, "")
    wanted = [f"block-{index:05d}.{kind}" for index in range(BLOCKS) for kind in ("tmp", "json.tmp")]
    assert sorted(name for name in waited if "block" in name) == (sorted(wanted) if method == "gptq" else [])
