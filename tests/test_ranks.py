"""Two processes at one job: what they write, how they end, and what a user reads when one is lost.

Processes are forked from a server that has torch imported already (as in test_resume.py). Each finds the
others by the environment that torchrun makes, in a store that the test holds as torchrun does. No wait is
without an end: `run` kills what takes too long.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import families
import forked
import pytest
import torch
import torch.distributed as dist
from nights import nightly
from sums import assert_sums

from quantkit import cli
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.layouts import Statistic
from quantkit.models.machine import distributed
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate.capture import SiteSums

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
CALIBRATION = "--calibration text.txt --samples 6 --seqlen 32 --batch-size 2 --threads 1".split()
PLAIN = ["--group-size", "32", "--transform", "none", "--refine", "0"]
GPTQ = ["gptq", "model", *PLAIN, *CALIBRATION]
EVAL = ["eval", "model", "out", "--text", "text.txt", "--ctx", "32", "--limit", "4000", "--json"]
LONGEST = 240  # seconds until a test gives up, on a machine however busy
SERVER = multiprocessing.get_context("forkserver")
USED = ["transformers.models.llama.modeling_llama", "transformers.models.qwen3_moe.modeling_qwen3_moe"]
SERVER.set_forkserver_preload([__name__, *forked.KNOWN, *USED])


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
    raise QuantkitError("its weights are odd", "take others", UNSUPPORTED)


def wait(action) -> None:
    """Until the first block is staged."""
    while not Path("out.partial/block-00000.safetensors").exists():
        time.sleep(0.02)
    action()


def sleep() -> None:
    Path("asleep").touch()
    time.sleep(LONGEST)


def grow_impatient() -> None:
    distributed.TIMEOUT = timedelta(seconds=5)


FAULTS = {  # of the second rank, and of both
    "dies": (lambda: at_block(2, lambda: wait(die)), None),
    "fails": (lambda: at_block(2, lambda: wait(fail)), None),
    "hangs": (lambda: at_block(2, lambda: wait(sleep)), grow_impatient),
    "waits": (lambda: at_block(2, lambda: wait(sleep)), None),
}


def child(folder: Path, place: dict[str, object], log: str, arguments: list, fault: str | None) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update({key: str(value) for key, value in place.items()})
    own, both = FAULTS.get(fault, (None, None))
    if both:
        both()
    if own and place["RANK"]:
        own()
    for name, stream in [("out", 1), ("err", 2)]:
        target = os.open(f"{name}-{log}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, stream)
    sys.argv = ["quantkit", *map(str, arguments)]
    sys.stdout = os.fdopen(os.dup(1), "w")
    try:
        cli.main()
    finally:
        sys.stdout.flush()


def places_of(count: int) -> tuple[list[dict], dist.TCPStore]:
    """What torchrun tells each rank, and the store that they meet in."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    whole = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1"}
    whole |= {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    whole |= {"TORCHELASTIC_RESTART_COUNT": 0}
    return [whole | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(count)], store


def start(folder: Path, count: int, number: int, command: list, faulty: str | None = None) -> tuple:
    """Processes that run a command, and the store that they meet in."""
    places, store = places_of(count) if count > 1 else ([{}], None)
    processes = [
        SERVER.Process(
            target=child, args=(folder, place, f"{count}-{rank}-{number}", [*command, "-q"], faulty)
        )
        for rank, place in enumerate(places)
    ]
    for process in processes:
        process.start()
    return processes, store


def ended(folder: Path, processes: list) -> list[int]:
    """Exit codes, once all have ended."""
    end = time.monotonic() + LONGEST
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [process for process in processes if process.exitcode is None]
    for process in late:
        process.kill()
        process.join()
    assert not late, [path.read_text() for path in sorted(folder.glob("err-*"))]
    return [process.exitcode for process in processes]


def run(folder: Path, count: int, *commands: list, faulty: str | None = None) -> list[list[int]]:
    """Exit codes of `count` ranks that run each of these commands, one after another."""
    codes = []
    for number, command in enumerate(commands):
        processes, _store = start(folder, count, number, command, faulty)
        codes.append(ended(folder, processes))
    return codes


def make_folder(folder: Path) -> Path:
    folder.mkdir()
    families.save_tokenizer(families.save_model(folder / "model", "llama", **SIZES))
    (folder / "text.txt").write_text("\n".join(families.sentences() * 8))
    return folder


@pytest.fixture(scope="module", autouse=True)
def server():
    """Begins with its first process, whichever test that is of, and imports what this file does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        first = SERVER.Process(target=int)
        first.start()
        first.join()


COMMANDS = [
    [*GPTQ, "-o", "out"],
    EVAL,
    ["imatrix", "model", *CALIBRATION, "-o", "m.gguf"],
    ["gptq", "mixture", *PLAIN, *CALIBRATION, "-o", "experts"],
]
NIGHTLY_COMMANDS = [
    ["awq", "model", "--candidates", "4", *CALIBRATION, "-o", "awq"],
    ["gguf", "model", "-t", "Q4_0", *CALIBRATION, "-o", "model.gguf"],
]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Two folders in which one process and two have run the same commands."""
    return by_one_and_two(tmp_path_factory.mktemp("ranks"), COMMANDS)


@pytest.fixture(scope="module")
def done_at_night(tmp_path_factory):
    return by_one_and_two(tmp_path_factory.mktemp("at-night"), NIGHTLY_COMMANDS)


def by_one_and_two(top: Path, commands: list[list]) -> tuple[Path, Path]:
    one, two = make_folder(top / "one"), make_folder(top / "two")
    for folder in (one, two):
        families.save_tokenizer(families.save_model(folder / "mixture", "qwen3_moe", num_hidden_layers=1))
    assert run(one, 1, *commands) == [[0]] * len(commands)
    assert run(two, 2, *commands) == [[0, 0]] * len(commands)
    return one, two


def linears(place: Path) -> list[dict]:
    """Of a manifest."""
    return json.loads((place / "quantkit.json").read_text())["linears"]


def test_the_same_number_of_processes_writes_the_same_bytes(done):
    _, two = done
    assert run(two, 2, [*GPTQ, "-o", "again"]) == [[0, 0]]
    found, again = (
        {path.name: path.read_bytes() for path in (two / name).iterdir() if "timings" not in path.name}
        for name in ("out", "again")
    )
    assert {name: text.replace(b"again", b"out") for name, text in again.items()} == found


@pytest.mark.parametrize(
    "name, fixture", [("out", "done"), ("experts", "done"), *nightly(("awq", "done_at_night"))]
)
def test_two_processes_write_a_sample_of_the_quality_of_one(request, name, fixture):
    """A weight between two codes may tip, with it what comes after it in its row, and all blocks behind."""
    folders = request.getfixturevalue(fixture)
    one, two = ([row["error"] for row in linears(folder / name)] for folder in folders)
    assert one[0] == pytest.approx(two[0], rel=1e-3), "in the first linear few weights tip"
    assert sum(one) == pytest.approx(sum(two), rel=0.05)


@pytest.mark.nightly
def test_the_loss_of_a_file_with_an_encoded_head_is_measured(done_at_night):
    """Rank 0 measures it alone, with the encoded head in the baseline, too."""
    one, two = (card.read_text() for card in (folder / "model.gguf.md" for folder in done_at_night))
    assert "KL divergence" in one and one.count("|") == two.count("|")
    sizes = [(folder / "model.gguf").stat().st_size for folder in done_at_night]
    assert sizes[0] == sizes[1]


def test_an_evaluation_by_two_processes_is_that_of_one(done):
    one, two = (
        json.loads((folder / f"out-{count}-0-1").read_text())["models"]
        for count, folder in enumerate(done, 1)
    )
    assert_sums(two[0], one[0])  # of the same weights
    found, wanted = (models[1]["metrics"] for models in (two, one))
    assert found["ppl"]["value"] == pytest.approx(wanted["ppl"]["value"], rel=1e-3)
    assert found["kld"]["mean"] == pytest.approx(wanted["kld"]["mean"], rel=0.02)


SUMMED = Statistic.HESSIAN, Statistic.MAGNITUDE, Statistic.PEAK


def summed(folder: Path, place: dict[str, object]) -> None:
    """Statistics of half of the inputs on each rank, of all of them on one."""
    os.chdir(folder)
    os.environ.update({key: str(value) for key, value in place.items()})
    inputs = torch.randn(12, 40, 64, generator=torch.Generator().manual_seed(0)).split(2)
    with distributed.joined("cpu"):
        own = SiteSums(64, torch.device("cpu"), SUMMED)
        for batch in distributed.share(inputs):
            own.add(batch)
        found = own.finish()
        torch.save([found[kind] for kind in SUMMED], f"rank{distributed.rank()}.pt")
    assert not dist.is_initialized()


def test_sums_of_two_processes_are_those_of_one(tmp_path):
    places, _store = places_of(2)
    processes = [SERVER.Process(target=summed, args=(tmp_path, place)) for place in places]
    for process in processes:
        process.start()
    assert ended(tmp_path, processes) == [0, 0]
    inputs = torch.randn(12, 40, 64, generator=torch.Generator().manual_seed(0))
    whole = SiteSums(64, torch.device("cpu"), SUMMED)
    whole.add(inputs)
    wanted = whole.finish()
    for rank in (0, 1):
        hessian, magnitude, peak = torch.load(tmp_path / f"rank{rank}.pt")
        torch.testing.assert_close(
            hessian, wanted.hessian, rtol=1e-4, atol=1e-4 * wanted.hessian.diagonal().mean()
        )
        torch.testing.assert_close(magnitude, wanted[Statistic.MAGNITUDE], rtol=1e-4, atol=0)
        assert torch.equal(peak, wanted[Statistic.PEAK])


def test_the_manifest_says_how_many_there_were_and_the_fingerprint_does_not(done):
    manifests = [json.loads((folder / "out" / "quantkit.json").read_text()) for folder in done]
    assert [manifest.get("ranks") for manifest in manifests] == [None, 2]
    assert manifests[0]["job"] == manifests[1]["job"]


def test_an_importance_matrix_by_two_processes_is_that_of_one(done):
    one, two = ((folder / "m.gguf").read_bytes() for folder in done)
    assert one == two


def test_the_first_process_alone_speaks(done):
    _, two = done
    assert (two / "out-2-0-0").read_text().startswith("written")
    assert all((two / f"out-2-1-{number}").read_text() == "" for number in range(len(COMMANDS)))
    assert all((two / f"err-2-{rank}-{number}").read_text() == "" for rank in (0, 1) for number in (0, 1, 2))


def lost(folder: Path, fault: str) -> list[int]:
    """Exit codes of a job of two processes, the second of which has a fault."""
    make_folder(folder)
    return run(folder, 2, [*GPTQ, "-o", "out"], faulty=fault)[0]


def test_one_that_dies_ends_the_other_and_one_process_goes_on(done, tmp_path):
    folder = tmp_path / "dies"
    assert lost(folder, "dies") == [1, -signal.SIGKILL]
    error, hint = (folder / "err-2-0-0").read_text().splitlines()
    assert error.startswith("error: rank 1 was lost: ")
    assert hint.startswith("hint: finished blocks are kept in out.partial; continue, with any number of")
    assert "torchrun --nproc-per-node 2 -m quantkit gptq" in hint and hint.endswith("--resume")
    assert run(folder, 1, [*GPTQ, "-o", "out", "--resume"]) == [[0]]
    found, alone = (sum(row["error"] for row in linears(place / "out")) for place in (folder, done[0]))
    assert found == pytest.approx(alone, rel=0.05)


def test_the_error_of_another_is_told_by_the_first(tmp_path):
    folder = tmp_path / "fails"
    assert lost(folder, "fails") == [4, 4]
    lines = (folder / "err-2-0-0").read_text().splitlines()
    assert lines == ["error: rank 1: its weights are odd", "hint: take others"]
    assert (folder / "err-2-1-0").read_text() == ""


@pytest.mark.nightly
def test_one_that_hangs_ends_the_other_after_the_time_limit(tmp_path):
    folder = make_folder(tmp_path / "hangs")
    processes, _store = start(folder, 2, 0, [*GPTQ, "-o", "out"], "hangs")
    assert ended(folder, processes[:1]) == [1]
    assert (folder / "err-2-0-0").read_text().startswith("error: rank 1 was lost: ")
    processes[1].kill()
    assert ended(folder, processes) == [1, -signal.SIGKILL]


def test_one_that_waits_for_another_ends_when_it_is_asked_to(tmp_path):
    """As torchrun asks all others when one has died; after 30 s it would kill them."""
    folder = make_folder(tmp_path / "waits")
    processes, _store = start(folder, 2, 0, [*GPTQ, "-o", "out"], "waits")
    until(lambda: (folder / "asleep").exists())
    processes[0].terminate()
    assert ended(folder, processes[:1]) == [143]
    error, hint = (folder / "err-2-0-0").read_text().splitlines()
    assert error == "error: terminated; finished blocks are kept in out.partial"
    assert hint.startswith("hint: continue with: torchrun --nproc-per-node 2 -m quantkit gptq")
    processes[1].kill()
    ended(folder, processes)


def until(holds) -> None:
    end = time.monotonic() + LONGEST
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def burn() -> None:
    while True:
        sum(range(10**6))


@pytest.mark.nightly
def test_a_finished_job_ends_well_while_others_use_the_cores(tmp_path):
    folder = make_folder(tmp_path / "busy")
    others = [SERVER.Process(target=burn, daemon=True) for _ in range(2)]
    for other in others:
        other.start()
    try:
        commands = [["imatrix", "model", *CALIBRATION, "-o", f"{k}.gguf"] for k in range(2)]
        assert run(folder, 2, *commands) == [[0, 0]] * 2
    finally:
        for other in others:
            other.kill()
            other.join()
    assert all((folder / f"{k}.gguf").exists() for k in range(2))


# ---- who never meets


def alone(folder: Path, **place: object) -> int:
    """The exit code of a process that is told of others."""
    process = SERVER.Process(target=child, args=(folder, place, "0", [*GPTQ, "-o", "out"], None))
    process.start()
    return ended(folder, [process])[0]


NUMBERS = "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"


@pytest.mark.parametrize(
    "name, count",
    [("WORLD_SIZE", 2), ("RANK", 1), *nightly(*((name, 2) for name in NUMBERS if name != "WORLD_SIZE"))],
)
def test_an_environment_that_counts_in_letters_is_refused(tmp_path, name, count):
    place = {"WORLD_SIZE": count, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1} | {name: "x"}
    assert alone(tmp_path, **place) == 2
    error, hint = (tmp_path / "err-0").read_text().splitlines()
    assert error == f"error: {name}='x' in the environment is not a number" and "torchrun" in hint


@pytest.fixture
def silent():
    """The port of a master that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_master_that_does_not_answer_is_an_error(tmp_path, silent, monkeypatch):
    place = {"WORLD_SIZE": 2, "RANK": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": silent}
    process = SERVER.Process(target=hurried, args=(tmp_path, place))
    process.start()
    assert ended(tmp_path, [process]) == [1]
    error, hint = (tmp_path / "err-0").read_text().splitlines()
    assert error.startswith("error: the 2 processes of WORLD_SIZE did not find each other within 2 s: ")
    assert "torchrun" in hint


def hurried(folder: Path, place: dict[str, object]) -> None:
    distributed.HANDSHAKE = 2
    child(folder, place, "0", [*GPTQ, "-o", "out"], None)


def test_a_process_that_waits_for_its_master_ends_when_it_is_asked_to(tmp_path, silent):
    place = {"WORLD_SIZE": 2, "RANK": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": silent}
    process = SERVER.Process(target=child, args=(tmp_path, place, "0", [*GPTQ, "-o", "out"], None))
    process.start()
    with socket.create_connection(("127.0.0.1", silent)):
        time.sleep(3)
    process.terminate()
    assert ended(tmp_path, [process]) == [143]
    assert "did not find" not in (tmp_path / "err-0").read_text()


@pytest.mark.parametrize(
    "command, told",
    [
        (["nf4", "model"], "nf4 without calibration has nothing that 2 processes could share"),
        (
            ["gptq", "model", "--solver", "yaqa", *CALIBRATION],
            "--solver yaqa does not run as several processes",
        ),
        (["inspect", "model"], "inspect does not run as several processes, but 2 were started"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_one_line(done, tmp_path, command, told):
    folder = tmp_path / "refused"
    folder.mkdir()
    for name in ("model", "text.txt"):
        (folder / name).symlink_to(done[1] / name)
    assert run(folder, 2, command) == [[4, 4]]
    error, hint = (folder / "err-2-0-0").read_text().splitlines()
    assert error.startswith(f"error: {told}") and "torchrun" in hint
    assert (folder / "err-2-1-0").read_text() == ""


@pytest.mark.parametrize("total, wanted", [(7, [[0, 1], [2, 3], [4, 5, 6]]), (2, [[], [0], [1]])])
def test_shares_are_whole_and_in_order(monkeypatch, total, wanted):
    monkeypatch.setattr(distributed, "count", lambda: 3)
    found = []
    for rank in range(3):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        found.append(list(distributed.share(range(total))))
    assert found == wanted


def test_one_process_is_alone():
    assert (distributed.count(), distributed.rank(), distributed.local()) == (1, 0, 1)
    assert distributed.all_gather("x") == ["x"] and distributed.broadcast(lambda: 5) == 5
    items = [1, 2]
    assert distributed.share(items) is items
