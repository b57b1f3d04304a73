"""A job stopped at any moment and resumed writes the bytes that an uninterrupted one writes.

Jobs run in processes forked from one that has imported everything, so that a kill is a real one and costs no
start. `tests/test_stops.py` sends signals at every step of every method,
scripts/reliability.py kills at random.
"""

import fcntl
import json
import re
import shlex
import shutil
import signal
import threading
from pathlib import Path

import families
import forked
import pytest
import torch
import yaml
from jobs import contents
from nights import by_day, nightly

from quantkit.errors import QuantkitError
from quantkit.quantize.outputs import folder as folder_output
from quantkit.quantize.prepare import plan
from quantkit.quantize.staging import blocks as staged_blocks
from quantkit.quantize.staging import parts
from quantkit.quantize.staging.folder import Staging

BLOCKS = 3
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": BLOCKS}
PLAIN = "--transform none --refine 0".split()
OPTIONS = "-o out --group-size 64 --loss-tokens 64 --samples 6 --seqlen 32 --batch-size 2 --threads 1".split()
KILL = int(signal.SIGKILL)
NEXT = ("quantkit.quantize.staging.folder:Staging.write_block", 2, KILL)  # a block of this run is there
SLOW = ("failing:slow", [])


@pytest.fixture(scope="module")
def workplace(forker, tmp_path_factory) -> Path:
    """A folder with two models, two texts, and `reference/out`, an uninterrupted job's result."""
    folder = tmp_path_factory.mktemp("workplace")
    for name, seed in [("model", 0), ("other", 1)]:
        families.save_tokenizer(families.save_model(folder / name, "llama", seed=seed, **SIZES))
        (folder / f"{name}.txt").write_text("\n".join(families.sentences(seed=seed)))
    assert forker.learn(folder / "reference", job(folder)) == 0, forked.said(folder / "reference")
    return folder


@pytest.fixture(scope="module")
def reference(workplace) -> dict[str, bytes]:
    return contents(workplace / "reference" / "out")


def job(workplace: Path, model: str = "model", text: str = "model.txt") -> list:
    return ["gptq", workplace / model, *OPTIONS, *PLAIN, "--calibration", workplace / text]


def recipe_job(workplace: Path, folder: Path) -> list:
    """The same from a recipe, partly overruled."""
    calibration = {"calibration": str(workplace / "model.txt"), "samples": 128, "seqlen": 32}
    recipe = {"method": "gptq", "model": str(workplace / "model"), "output": "out"}
    quant = {"group_size": 32, "transform": "none", "refine": 0}
    recipe |= {"quant": quant, "calibration": calibration, "run": {"threads": 1, "loss_tokens": 64}}
    (folder / "mine.yaml").write_text(yaml.safe_dump(recipe))
    settings = ["quant.group_size=64", "calibration.samples=6"]
    return ["run", "mine.yaml", "--set", settings[0], "--set", settings[1], "--batch-size", 2]


@pytest.fixture
def quantkit(quantkit):
    """Runs the command line in this process, in `tmp_path`: exit code and stderr, which is left quiet."""

    def invoke(*arguments) -> tuple[int, str]:
        done = quantkit(*arguments, "-q")
        return done.code, done.err

    yield invoke
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Where a job of another process runs; what it says lies beside it."""
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


@pytest.fixture(scope="module")
def one_block(forker, workplace) -> Path:
    """What a killed job leaves after its first block."""
    assert forker.run(workplace / "staged", job(workplace), stop=NEXT) == -KILL
    return workplace / "staged" / "out.partial"


@pytest.fixture
def staged(one_block, tmp_path) -> Path:
    """A copy of it in the folder of the test."""
    copy = tmp_path / "out.partial"
    copy.mkdir()
    for name, content in contents(one_block).items():
        (copy / name).write_bytes(content)
    return copy


# ---- kills


@pytest.mark.parametrize(
    ("place", "call", "blocks", "left"),
    [
        ("os:replace", 5, 1, "block-00001.safetensors.tmp"),
        ("quantkit.quantize.staging.folder:Staging.publish", 1, BLOCKS, "output/README.md"),
        *nightly(
            ("quantkit.quantize.outputs.folder:write_json", 1, BLOCKS, "output/tokenizer.json"),
            ("quantkit.quantize.outputs.folder:model_card", 1, BLOCKS, "output/quantkit-timings.json"),
        ),
    ],
)
def test_killed_at_the_worst_moments(forker, workplace, reference, folder, place, call, blocks, left):
    partial = folder / "out.partial"
    assert forker.run(folder, job(workplace), stop=(place, call, KILL)) == -KILL
    assert not (folder / "out").exists() and (partial / left).exists()
    if left.endswith(".tmp"):  # of which the disk may have a part
        (partial / left).write_bytes((partial / left).read_bytes()[:1000])
    assert len(list(partial.glob("block-*.safetensors"))) == blocks
    assert forker.run(folder, [*job(workplace), "--resume"]) == 0, forked.said(folder)
    assert contents(folder / "out") == reference
    assert f"{blocks} of {BLOCKS} blocks" in forked.said(folder)
    assert not partial.exists()


def test_killed_after_every_block(forker, workplace, reference, folder):
    """Each run adds one block to those before it: nothing is computed twice."""
    for done in range(1, BLOCKS):
        assert forker.run(folder, [*job(workplace), "--resume"], stop=NEXT) == -KILL
        assert len(list(folder.glob("out.partial/block-*.safetensors"))) == done
    assert forker.run(folder, [*job(workplace), "--resume"], stop=NEXT) == 0
    assert contents(folder / "out") == reference


@pytest.mark.parametrize(("rename", "place"), [(2, "out.partial/replaced/out"), *nightly((1, "out"))])
def test_killed_while_replacing_an_output(forker, workplace, reference, folder, rename, place):
    """The old output is there, or between the renames in the staging folder, until the new one is."""
    (folder / "out").mkdir()
    (folder / "out" / "config.json").write_text("old")
    assert forker.run(folder, [*job(workplace), "--overwrite"], stop=("os:rename", rename, KILL)) == -KILL
    assert contents(folder / place) == {"config.json": b"old"}
    assert contents(folder / "out.partial" / "output") == reference
    if place == "out":
        assert forker.run(folder, [*job(workplace), "--resume"]) == 2
        assert contents(folder / place) == {"config.json": b"old"}
    assert forker.run(folder, [*job(workplace), "--resume", "--overwrite"]) == 0, forked.said(folder)
    assert contents(folder / "out") == reference
    assert sorted(path.name for path in folder.iterdir()) == ["out", "reached"]


def test_killed_with_the_output_in_place(forker, workplace, reference, folder):
    """The output is whole; what is left of the staging folder goes with the next run that may replace it."""
    stop = ("quantkit.quantize.staging.folder:Staging.discard", 1, KILL)
    assert forker.run(folder, job(workplace), stop=stop) == -KILL
    assert contents(folder / "out") == reference
    assert forker.run(folder, [*job(workplace), "--resume"]) == 2
    (folder / "out.partial" / f"block-{BLOCKS - 1:05d}.json").unlink()  # the folder's removal was cut short
    assert forker.run(folder, [*job(workplace), "--resume", "--overwrite"]) == 0, forked.said(folder)
    assert contents(folder / "out") == reference
    assert sorted(path.name for path in folder.iterdir()) == ["out", "reached"]


@pytest.mark.parametrize(
    ("call", "more"),
    [
        *((("failing:swallow", [1]), []), (SLOW, None)),
        *nightly((SLOW, ["--overwrite"]), (("failing:swallow", [2]), [])),
    ],
)
def test_interrupted_by_hand(forker, workplace, reference, folder, call, more):
    """What the hint says can be pasted, whatever the command was."""
    if more:
        (folder / "out").mkdir()
    arguments = recipe_job(workplace, folder) if more is None else [*job(workplace), *more]
    process = forker.start(folder, arguments, call=call)
    if call == SLOW:
        wait_for(folder / "out.partial" / "block-00000.safetensors", process)
        process.send(signal.SIGINT)
    code, log = process.wait(forked.PATIENCE), forked.said(folder)
    assert code == 130, log
    *_, error, hint = log.splitlines()
    none = call[1] == [1]
    left = "no block is finished yet" if none else "finished blocks are kept in out.partial"
    assert error == f"error: interrupted; {left}"
    command, *arguments = shlex.split(hint.removeprefix("hint: continue with: "))
    assert command == "quantkit" and arguments[-1] == "--resume"
    assert forker.run(folder, arguments) == 0, forked.said(folder)
    assert contents(folder / "out") == reference
    assert not (folder / "out.partial").exists()


def wait_for(path: Path, process: forked.Job) -> None:
    while not path.exists():
        assert process.wait(0.01) is None


# ---- what may be resumed, and with what


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("--damp 0.02", ["--damp (0.05 there, 0.02 here)"]),
        ("--solver rtn", ["--solver (gptq there, rtn here)", "calibration text (one there, none here)"]),
        ("--exclude o_proj", ["--exclude (none there, o_proj here)"]),
        ("--override o_proj=8", ["--override (none there, o_proj=8 here)"]),
        ("--transform auto", ["--transform (none there, auto here)"]),
        ("--max-shard-gb 1", ["--max-shard-gb (none there, 1.0 here)"]),
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


def test_of_another_commands_job_only_shared_options_are_compared(workplace, quantkit, staged):
    code, said = quantkit("nf4", workplace / "model", "-o", "out", "--resume")
    assert code == 2 and said.startswith("error: out.partial holds another job; different: "), said
    assert "(gptq there, nf4 here)" in said and "--bits" not in said and "--sym" not in said


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
    assert code == 2 and f"torch (0.1 there, {torch.__version__} here)" in said


@pytest.mark.parametrize("left", ["fingerprint.json.tmp", *nightly(None, "lock")])
def test_nothing_staged_starts_afresh(workplace, reference, quantkit, tmp_path, left):
    if left:  # killed before the fingerprint was written
        (tmp_path / "out.partial").mkdir()
        (tmp_path / "out.partial" / left).write_text("?")
    assert quantkit(*job(workplace), "--resume") == (0, "")  # as in a pipeline's first run: no warning
    assert contents(tmp_path / "out") == reference


def test_how_the_first_run_ran_is_adopted(forker, workplace, tmp_path):
    how = "--batch-size 3 --threads 2 --sequential repeat --dtype bfloat16".split()
    plain = ["gptq", workplace / "model", *OPTIONS[:-4], *PLAIN, "--calibration", workplace / "model.txt"]
    assert forker.run(tmp_path / "whole", [*plain, *how]) == 0
    assert forker.run(tmp_path / "killed", [*plain, *how], stop=NEXT) == -KILL
    assert forker.run(tmp_path / "killed", [*plain, "--resume"]) == 0
    execution = json.loads((tmp_path / "killed/out/quantkit.json").read_text())["job"]["execution"]
    assert execution == {
        "dtype": "bfloat16", "device": "cpu", "batch_size": 3, "sequential": "repeat", "threads": 2,
    }  # fmt: skip
    assert contents(tmp_path / "killed/out") == contents(tmp_path / "whole/out")


@pytest.mark.parametrize("asked", ["fp8 --static --kv-cache", *nightly("fp4 --activations --transform none")])
def test_jobs_of_other_kinds_resume(forker, workplace, tmp_path, asked):
    """With scales of inputs, keys and values among what is staged."""
    method, *flags = asked.split()
    text = ["--calibration", workplace / "model.txt", "--samples", 6, "--seqlen", 32]
    words = [method, workplace / "model", "-o", "out", "--threads", 1, *flags, *text]
    assert forker.run(tmp_path / "whole", [*words, "--json", "-q"]) == 0
    told = json.loads(forked.said(tmp_path / "whole"))
    assert (told["schema"], told["linears"]) == ("quantkit.job/3", 7 * BLOCKS)
    assert forker.run(tmp_path / "killed", words, stop=NEXT) == -KILL
    assert forker.run(tmp_path / "killed", [*words, "--resume"]) == 0
    assert f"1 of {BLOCKS} blocks" in forked.said(tmp_path / "killed")
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
DAMAGED_BY_DAY = ("a bit of its tensors", "a record that is a list")


@pytest.mark.parametrize("what", by_day(DAMAGE, DAMAGED_BY_DAY))
def test_a_staged_block_that_was_damaged_is_made_again(workplace, reference, quantkit, staged, what):
    DAMAGE[what](staged)
    code, said = quantkit(*job(workplace), "--resume")
    assert code == 0, said
    assert "warning: damaged staged blocks are quantized again: 1\n" in said
    assert contents(staged.parent / "out") == reference


@pytest.mark.parametrize(("late", "resumed"), [("late", 0), *nightly(("early", 1))])
def test_a_source_that_is_hashed_beside_the_job(forker, workplace, reference, folder, late, resumed):
    """Blocks staged before the hash was known could be another source's: they are made again."""
    beside = ("failing:hash_beside", [60 if late == "late" else 0.1])
    assert forker.run(folder, job(workplace), call=beside, stop=NEXT) == -KILL
    fingerprint = json.loads((folder / "out.partial/fingerprint.json").read_text())
    assert (fingerprint["source_sha256"] is None) == (late == "late")
    assert forker.run(folder, [*job(workplace), "--resume"], call=("failing:hash_beside", [0.1])) == 0
    log = forked.said(folder)
    assert f"{resumed} of {BLOCKS} blocks" in log if resumed else "done already" not in log
    assert contents(folder / "out") == reference


@pytest.mark.parametrize("mode", ["--resume", *nightly("--overwrite")])
def test_one_process_at_a_time(forker, workplace, reference, quantkit, monkeypatch, tmp_path, mode):
    """The second is refused before it plans anything."""
    process = forker.start(tmp_path, job(workplace), call=SLOW)
    wait_for(tmp_path / "out.partial" / "block-00000.safetensors", process)
    with monkeypatch.context() as patch:
        patch.setattr(plan, "decide", None)
        code, said = quantkit(*job(workplace), mode)
    assert code == 1 and "out.partial is in use by another process" in said
    assert process.wait(forked.PATIENCE) == 0, forked.said(tmp_path)
    assert contents(tmp_path / "out") == reference


def test_a_folder_that_another_job_removes_while_its_lock_is_taken(monkeypatch, tmp_path):
    """The lock of a removed file locks nothing: the next job makes the folder and takes its lock again."""
    flock, staging = fcntl.flock, Staging(tmp_path / "out")

    def removed_first(*arguments) -> None:
        monkeypatch.undo()
        shutil.rmtree(staging.folder)
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with staging.opened({"quantkit": "", "source_sha256": None}, resume=False):
        assert sorted(path.name for path in staging.folder.iterdir()) == ["fingerprint.json", "lock"]
        with pytest.raises(QuantkitError, match="in use by another process"):
            Staging(tmp_path / "out")._acquire()


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
    kinds = "safetensors.tmp", "json.tmp"
    wanted = [f"block-{index:05d}.{kind}" for index in range(BLOCKS) for kind in kinds]
    assert sorted(name for name in waited if "block" in name) == (sorted(wanted) if method == "gptq" else [])


def test_a_job_goes_on_while_its_disk_writes(tmp_path, monkeypatch):
    """A block's rest queues behind its last part, and the next block begins. It ends after the disk wrote the
    block before it, and not at all if a part fails."""
    staging, may_write = Staging(tmp_path / "out"), threading.Event()
    write = staged_blocks.save_file

    def slow(tensors, *arguments, **named):
        assert may_write.wait(60)
        if "broken" in tensors:
            raise OSError("no space left")
        write(tensors, *arguments, **named)

    monkeypatch.setattr(staged_blocks, "save_file", slow)
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    with staging.opened({"source_sha256": "ab" * 32}, resume=False):
        first = parts.BlockParts(staging, 0)
        first.add({"part": torch.arange(8)})
        first.finish([{"name": "a"}])
        second = parts.BlockParts(staging, 1)  # nothing is written yet
        assert torch.equal(first.tensor("part"), torch.arange(8)) and not staging.is_done(0)
        may_write.set()
        second.finish([])
        assert staging.is_done(0) and torch.equal(staging.read(0)["part"], torch.arange(8))
        third = parts.BlockParts(staging, 2)
        third.add({"broken": torch.ones(1)})
        third.finish([])
        with pytest.raises(OSError, match="no space left"):
            staging.wait()
    assert staging.is_done(1) and not staging.is_done(2) and not staging.path(2).exists()
