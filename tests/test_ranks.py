"""Two processes at one job: what they write is what one writes, and when one is lost, both end at once.

Processes are forked from a server that has torch imported already (as in test_resume.py). Each finds the
others by the environment that torchrun makes. No wait is without an end: `run` kills what takes too long.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

import families
import pytest
import torch

from quantkit import cli
from quantkit.models.machine import heartbeat, parcels, ranks
from quantkit.models.open import open_checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize import loop
from quantkit.quantize.staging import folder as staging

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CALIBRATION = "--calibration text.txt --samples 6 --seqlen 32 --batch-size 2 --threads 1".split()
GPTQ = ["gptq", "model", "--group-size", "32", *CALIBRATION]
EVAL = ["eval", "model", "out", "--text", "text.txt", "--ctx", "32", "--limit", "9000", "--json"]
LONGEST = 240  # seconds until a test gives up, on a machine however busy
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([__name__])
assert loop  # imported here for the server's sake


# ---- what befalls a rank


def at_block(number: int, action) -> None:
    """Do something when a block is loaded for the so-manieth time."""
    whole, calls = Skeleton.load_block, []

    def replaced(*arguments, **options):
        calls.append(1)
        if len(calls) == number:
            action()
        return whole(*arguments, **options)

    Skeleton.load_block = replaced


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    from quantkit.errors import UNSUPPORTED, QuantkitError

    raise QuantkitError("its weights are odd", "take others", UNSUPPORTED)


def wait(action) -> None:
    """Until the first block is staged."""
    while not Path("out.partial/block-00000.safetensors").exists():
        time.sleep(0.02)
    action()


def sleep() -> None:
    time.sleep(LONGEST)


def unordered() -> None:
    """As on GPUs: sums as they come, and rows of linears on all ranks."""
    ranks.in_order = lambda: False


def grow_impatient() -> None:
    """From here on the other has nothing to do but what is waited for."""
    heartbeat.STUCK, heartbeat.GRACE = 2.0, 0.5


FAULTS = {  # of the second rank, and what the first does then
    "dies": (lambda: at_block(2, lambda: wait(die)), None),
    "fails": (lambda: at_block(2, lambda: wait(fail)), None),
    "unordered": (unordered, unordered),
    "hangs": (lambda: at_block(2, lambda: wait(sleep)), lambda: at_block(2, grow_impatient)),
}


def child(folder: Path, rank: int, count: int, commands: list, fault: str | None) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    heartbeat.BEAT = 0.1
    if fault and FAULTS[fault][not rank]:
        FAULTS[fault][not rank]()
    for number, (port, arguments) in enumerate(commands):
        for name, stream in [("out", 1), ("err", 2)]:
            log = os.open(f"{name}-{count}-{rank}-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, stream)
        if count > 1:
            place = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "LOCAL_RANK": rank}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({key: str(value) for key, value in place.items()})
        sys.argv = ["quantkit", *map(str, arguments)]
        sys.stdout = os.fdopen(os.dup(1), "w")
        try:
            cli.main()
        except SystemExit as ended:
            sys.stdout.flush()
            if ended.code:
                raise


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def run(folder: Path, count: int, *commands: list, faulty: str | None = None) -> list[int]:
    """Exit codes of `count` ranks that run these commands one after another."""
    placed = [(free_port(), [*command, "-q"]) for command in commands]
    processes = [
        SERVER.Process(target=child, args=(folder, rank, count, placed, faulty)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + LONGEST
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [process for process in processes if process.exitcode is None]
    for process in late:
        process.kill()
        process.join()
    assert not late, [path.read_text() for path in sorted(folder.glob("err-*"))]
    return [process.exitcode for process in processes]


def make_folder(folder: Path) -> Path:
    folder.mkdir()
    families.save_tokenizer(families.save_model(folder / "model", "llama", **SIZES))
    families.save_tokenizer(families.save_model(folder / "mixture", "qwen3_moe", num_hidden_layers=1))
    (folder / "text.txt").write_text("\n".join(families.sentences() * 8))
    return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Two folders in which one process and two have run the same commands."""
    top = tmp_path_factory.mktemp("ranks")
    commands = [
        [*GPTQ, "-o", "out"],
        EVAL,
        ["imatrix", "model", *CALIBRATION, "-o", "m.gguf"],
        ["awq", "model", "--group-size", "32", *CALIBRATION, "-o", "awq"],
        ["gptq", "mixture", "--group-size", "32", *CALIBRATION, "-o", "experts"],
    ]
    with pytest.MonkeyPatch.context() as patch:  # for the server, which begins with the first process
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setenv("OMP_WAIT_POLICY", "passive")
        one, two = make_folder(top / "one"), make_folder(top / "two")
        assert run(one, 1, *commands) == [0]
    assert run(two, 2, *commands, [*GPTQ, "-o", "again"]) == [0, 0]
    return one, two


def weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(str(folder))
    return {name: checkpoint.read(name).float() for name in sorted(checkpoint.names)}


def furthest(one: Path, other: Path) -> float:
    """The largest difference of any weight."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.mark.parametrize("name", ["out", "awq", "experts"])
def test_two_processes_write_the_weights_of_one(done, name):
    one, two = done
    assert furthest(one / name, two / name) <= 1e-5


def test_the_same_number_of_processes_writes_the_same_bytes(done):
    _, two = done
    found, again = (
        {path.name: path.read_bytes() for path in (two / name).iterdir() if "timings" not in path.name}
        for name in ("out", "again")
    )
    assert {name: text.replace(b"again", b"out") for name, text in again.items()} == found


def test_rows_of_linears_on_both_and_sums_as_they_come(done, tmp_path):
    """A weight between two codes may tip, with it what comes after it in its row, and all blocks behind: how
    many do depends on the processor. What comes out is another sample of the same quality."""
    folder = make_folder(tmp_path / "unordered")
    jobs = [[*GPTQ, "-o", name, "--batch-size", "3"] for name in ("out", "again")]
    assert run(folder, 2, *jobs, faulty="unordered") == [0, 0]
    first, again = weights(folder / "out"), weights(folder / "again")
    assert all(torch.equal(first[name], again[name]) for name in first)
    found, alone = ([row["error"] for row in linears(place / "out")] for place in (folder, done[0]))
    assert found[0] == pytest.approx(alone[0], rel=1e-3), "in the first block few weights tip"
    assert sum(found) == pytest.approx(sum(alone), rel=0.05)


def linears(place: Path) -> list[dict]:
    """Of a manifest."""
    return json.loads((place / "quantkit.json").read_text())["linears"]


def test_the_manifest_says_how_many_there_were_and_the_fingerprint_does_not(done):
    manifests = [json.loads((folder / "out" / "quantkit.json").read_text()) for folder in done]
    assert [manifest.get("ranks") for manifest in manifests] == [None, 2]
    assert manifests[0]["job"] == manifests[1]["job"]


def test_an_evaluation_by_two_processes_is_that_of_one(done):
    one, two = (json.loads((folder / f"out-{count}-0-1").read_text()) for count, folder in enumerate(done, 1))
    assert [row["metrics"]["ppl"]["value"] for row in one["models"]] == pytest.approx(
        [row["metrics"]["ppl"]["value"] for row in two["models"]], rel=1e-4
    )
    assert one["models"][0] == two["models"][0]  # of the same weights, to the last digit


def test_an_importance_matrix_by_two_processes_is_that_of_one(done):
    one, two = ((folder / "m.gguf").read_bytes() for folder in done)
    assert one == two


def test_the_first_process_alone_speaks(done):
    _, two = done
    assert (two / "out-2-0-0").read_text().startswith("written")
    assert all((two / f"out-2-1-{number}").read_text() == "" for number in range(6))
    assert all((two / f"err-2-{rank}-{number}").read_text() == "" for rank in (0, 1) for number in (0, 1, 2))


@pytest.fixture(scope="module")
def lost(tmp_path_factory, done):
    """Jobs of two processes of which the second dies, fails or hangs: the folder, and the exit codes."""
    top = tmp_path_factory.mktemp("lost")

    def make(fault: str) -> tuple[Path, list[int]]:
        folder = make_folder(top / fault)
        return folder, run(folder, 2, [*GPTQ, "-o", "out"], faulty=fault)

    return make


def test_one_that_dies_ends_the_other_and_one_process_goes_on(lost, done):
    folder, codes = lost("dies")
    assert codes == [1, -signal.SIGKILL]
    error, hint = (folder / "err-2-0-0").read_text().splitlines()
    assert error == "error: rank 1 died"
    assert hint.startswith("hint: finished blocks are kept in out.partial; continue, with any number of")
    assert "torchrun --nproc-per-node 2 -m quantkit gptq" in hint and hint.endswith("--resume")
    assert run(folder, 1, [*GPTQ, "-o", "out", "--resume"]) == [0]
    assert furthest(folder / "out", done[0] / "out") <= 1e-5


def test_the_error_of_another_is_told_by_the_first(lost):
    folder, codes = lost("fails")
    assert codes == [4, 4]
    lines = (folder / "err-2-0-0").read_text().splitlines()
    assert lines == ["error: rank 1: its weights are odd", "hint: take others"]
    assert (folder / "err-2-1-0").read_text() == ""


def test_one_that_hangs_is_noticed_though_it_has_a_pulse(lost):
    folder, codes = lost("hangs")
    assert codes == [1, -signal.SIGKILL]
    assert (folder / "err-2-0-0").read_text().startswith("error: rank 1 hangs: it has done nothing for ")


@pytest.mark.parametrize(
    "command, told",
    [
        (["nf4", "model"], "nf4 without calibration has nothing that 2 processes could share"),
        (
            ["gptq", "model", "--solver", "yaqa", *CALIBRATION],
            "--solver yaqa does not run as several processes",
        ),
        (["inspect", "model"], "inspect does not run as several processes, and 2 were started"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_one_line(done, tmp_path, command, told):
    folder = make_folder(tmp_path / "refused")
    assert run(folder, 2, command) == [4, 4]
    error, hint = (folder / "err-2-0-0").read_text().splitlines()
    assert error.startswith(f"error: {told}") and "torchrun" in hint
    assert (folder / "err-2-1-0").read_text() == ""


def test_shares_are_whole_and_in_order(monkeypatch):
    monkeypatch.setattr(ranks, "count", lambda: 3)
    assert ranks.spans(7) == [range(0, 2), range(2, 4), range(4, 7)]
    assert ranks.spans(2) == [range(0, 0), range(0, 1), range(1, 2)]


def test_one_process_is_alone():
    assert (ranks.count(), ranks.rank(), ranks.local()) == (1, 0, 1)
    assert ranks.gathered("x") == ["x"] and ranks.told(lambda: 5) == 5
    items = [1, 2]
    assert ranks.share(items) is items and not ranks.in_order()
    assert isinstance(staging.Staging(Path("out")), staging.Staging)


def test_tensors_travel_beside_what_holds_them():
    value = {"a": torch.arange(3), "b": [torch.zeros(2, 2, dtype=torch.bfloat16), "text"]}
    parcel, tensors = parcels.packed(value)
    assert [tensor.dtype for tensor in tensors] == [torch.int64, torch.bfloat16]
    assert parcels.kinds_of(parcel) == [((3,), torch.int64, "cpu"), ((2, 2), torch.bfloat16, "cpu")]
    found = parcels.unpacked(parcel, tensors)
    assert found["a"] is value["a"] and found["b"] == value["b"]
