"""Models larger than memory: what a process may take, states in a file, how often and in which order weights
are read, and the refusal of what does not fit."""

import json
import re
import resource
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import jobs
import psutil
import pytest
import torch
from nights import by_day
from safetensors.torch import load_file, save_file

from quantkit.models.files import head as head_of
from quantkit.models.files import reading, safetensors_folder
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine import memory
from quantkit.models.machine.memory import Room
from quantkit.models.skeleton import Skeleton, linears
from quantkit.models.skeleton import rows as by_rows
from quantkit.quantize import job, loop
from quantkit.quantize.calibrate.states import Place, Spill, States
from quantkit.quantize.outputs import finish
from quantkit.quantize.prepare import plan
from quantkit.quantize.prepare.memory import HEAP
from quantkit.quantize.progress import Progress

CPU = torch.device("cpu")
SMALL = jobs.GPTQ
AWQ = {"group_size": 32, "candidates": 4}

# ---- what a process may take


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A host with 100 GB free and no limits; returns where its control groups lie."""
    host = type("memory", (), {"available": 100 * 10**9})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    own = memory.containers
    monkeypatch.setattr(memory, "containers", lambda: own(tmp_path))
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def group(folder: Path, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_a_host_without_limits_gives_what_is_free(machine):
    assert memory.room() == Room(100 * 10**9, "free")
    (machine / "proc/self/cgroup").write_text("0::/\n")
    assert memory.room() == Room(100 * 10**9, "free")


def test_the_least_of_a_container_and_those_around_it_counts(machine):
    (machine / "proc/self/cgroup").write_text("0::/outer/inner\n")
    root = machine / "sys/fs/cgroup"
    stat = "anon 5\ninactive_file 200\nactive_file 30\n"
    group(root / "outer/inner", memory__max="max", memory__current=700, memory__stat=stat)
    assert memory.room().nbytes == 100 * 10**9
    group(root / "outer", memory__max=1000, memory__current=900, memory__stat=stat)
    assert memory.room() == Room(1000 - 900 + 230, "left in its container")
    group(root / "outer/inner", memory__max=800, memory__current=760, memory__stat=stat)
    assert memory.room() == Room(800 - 760 + 230, "left in its container")


def test_control_groups_of_the_first_version(machine):
    (machine / "proc/self/cgroup").write_text("5:cpu:/a\n4:memory:/not/here\n0::/\n")
    stat = "total_inactive_file 10\ninactive_file 1\ntotal_active_file 5\n"
    files = {"memory.usage_in_bytes": 300, "memory.limit_in_bytes": 1000, "memory.stat": stat}
    folder = machine / "sys/fs/cgroup/memory"  # as a container sees its own
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(str(content))
    assert memory.room() == Room(1000 - 300 + 15, "left in its container")


@pytest.mark.parametrize("kind, flag", [(resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")])
def test_what_ulimit_leaves(machine, monkeypatch, kind, flag):
    taken = SimpleNamespace(rss=1 << 28, vms=1 << 33, data=1 << 30)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda process: taken)
    already = taken.vms if flag == "-v" else taken.data
    limit = already + memory.RESERVE + 50 * 10**6
    found = {kind: (limit, limit)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: found.get(kind, (resource.RLIM_INFINITY,) * 2))
    assert memory.room() == Room(50 * 10**6, f"left by ulimit {flag}")


def test_max_memory_is_of_the_whole_process(machine, monkeypatch):
    monkeypatch.setattr(memory, "resident", lambda: 1 << 28)
    assert memory.Limit.of(10**9 * 50).left == 50 * 10**9 - (1 << 28)
    assert memory.Limit.of(1).left == 0 and memory.Limit.of(None) is None


# ---- states in a file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_spilled_comes_back(tmp_path, dtype):
    spill, kept = Spill(tmp_path / "not" / "there"), []
    for rows in (3, 5, 2):
        kept.append(torch.randn(rows, 7, 4).to(dtype))
        spill.append(kept[-1])
    assert list(tmp_path.iterdir()) == []  # the file has no name
    kept[0], kept[1] = torch.randn(40, 70, 4).to(dtype), torch.randn(1, 7, 4).to(dtype)
    spill[0], spill[1] = kept[0], kept[1]  # one that no longer fits its place, one that needs less
    for k, tensor in enumerate(kept):
        assert torch.equal(spill[k], tensor)
    spill[2].zero_()
    assert torch.equal(spill[2], kept[2])


def test_states_in_a_file_are_those_in_memory(tmp_path):
    batches = [torch.randn(2, 3, 4) for _ in range(3)]
    states = States(batches, CPU, Place("disk", tmp_path))
    assert len(states) == 3
    states.advance(hidden + 1 for hidden in states)
    assert all(torch.equal(one, other + 1) for one, other in zip(states, batches, strict=True))
    states[1] = torch.zeros(2, 9, 4)
    assert states[1].shape == (2, 9, 4) and torch.equal(states[2], batches[2] + 1)


JOBS = {
    "gptq": ("gptq", SMALL, {}),
    "original": ("gptq", SMALL | {"target": "original"}, {}),
    "yaqa": ("gptq", SMALL | {"solver": "yaqa"}, {}),
    "suspend": ("gptq", SMALL, {"sequential": "suspend"}),
    "awq": ("awq", AWQ, {}),
    "gguf": ("gguf", {"type": ("Q4_0",)}, {}),
    "gguf rtn": ("gguf", {"type": ("Q4_0",), "solver": "rtn"}, {}),
}


@pytest.mark.parametrize("name", by_day(JOBS, ["original", "suspend", "gguf rtn"]))
def test_states_in_a_file_change_no_byte(name, tiny_model, tmp_path):
    model = tiny_model("llama", tokenizer=True, num_hidden_layers=2)
    method, options, run = JOBS[name]
    run = {"sequential": "repeat", "calibration": jobs.calibration(tmp_path), "batch_size": 2} | run
    for states in ("device", "disk"):
        (tmp_path / states).mkdir()
        place = tmp_path / states / ("out.gguf" if method == "gguf" else "out")
        jobs.quantize(method, model, place, options, states=states, **run)
    one, other = (jobs.contents(tmp_path / states) for states in ("device", "disk"))
    assert one == other and {"out/model.safetensors", "out.gguf"} & one.keys()


def test_states_that_do_not_fit_are_spilled_and_said_so(tiny_model, tmp_path, monkeypatch):
    model, listener = tiny_model("llama", tokenizer=True), jobs.Listener()
    run, own = {"calibration": jobs.calibration(tmp_path), "batch_size": 1}, SMALL | {"target": "own"}
    plans = {
        states: jobs.prepare("gptq", model, tmp_path / states, own, sequential="repeat", states=states, **run)
        for states in ("device", "disk")
    }
    here, there = (plans[states].plan for states in ("device", "disk"))
    states = 6 * 32 * 64 * 4
    saved = HEAP * (states - 3 * states // 6)
    assert here.memory_bytes - there.memory_bytes == pytest.approx(saved, abs=1)
    assert there.disk_bytes - here.disk_bytes == states
    monkeypatch.setattr(plan, "free_memory", lambda device: there.memory_bytes)
    made = jobs.prepare("gptq", model, tmp_path / "out", own, listener, **run)
    assert made.plan.execution.states == "disk"
    summary = loop.run([made], listener)[0]
    assert summary.steps_down == [
        "hidden states do not fit into memory: a file next to the output keeps them"
    ]
    assert summary.steps_down[0] in listener.warnings
    timings = json.loads((tmp_path / "out" / "quantkit-timings.json").read_text())
    assert timings["steps_down"] == summary.steps_down


def test_an_evaluation_whose_states_are_in_a_file_measures_the_same(
    quantkit, tiny_model, tmp_path, monkeypatch
):
    from quantkit.evaluation import memory

    model = tiny_model("llama", tokenizer="bos")
    (tmp_path / "text.txt").write_text(Path(jobs.calibration(tmp_path).calibration).read_text() * 3)
    asked = ["eval", model, *"--as nf4 --text text.txt --ctx 32 --limit 640 --json".split()]
    here = json.loads(quantkit(*asked).out)
    places = []
    run = memory.decide

    def decide(*arguments):
        places.append(run(*arguments))
        return places[-1]

    monkeypatch.setattr(memory, "decide", decide)
    monkeypatch.setattr(memory, "COMFORT", 0.0)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(memory.tempfile, "tempdir", None)
    there = json.loads(quantkit(*asked).out)
    assert places == [Place("disk", tmp_path / "scratch")]
    assert list((tmp_path / "scratch").iterdir()) == []
    assert here == there


# ---- what is read


@pytest.fixture
def read(monkeypatch):
    """Every piece of a file that is read or copied: (file, offset, bytes), in order."""
    found, octets, raw = [], reading.octets, safetensors_folder.raw

    def counted(file, offset, nbytes, name):
        found.append((file, offset, nbytes))
        return octets(file, offset, nbytes, name)

    def copied(info):
        found.append((info.file, info.offset, info.nbytes))
        return raw(info)

    monkeypatch.setattr(reading, "octets", counted)
    monkeypatch.setattr(safetensors_folder, "raw", copied)
    return found


def times(read, checkpoint: Checkpoint, names=None) -> dict[str, int]:
    """How often each tensor of a checkpoint was read: all its bytes alike. names: of these only."""
    found = defaultdict(int)
    for info in map(checkpoint.infos.get, names or checkpoint.infos):
        for file, offset, nbytes in read:
            if file == info.file and offset < info.offset + info.nbytes and info.offset < offset + nbytes:
                assert offset == info.offset and nbytes == info.nbytes
                found[info.name] += 1
    return found


METHODS = {
    "nf4": ("nf4", {}, {}),
    "int8": ("int8", {}, {}),
    "gptq": ("gptq", SMALL, {"sequential": "repeat", "batch_size": 1}),
    "gptq suspend": ("gptq", SMALL, {"batch_size": 1}),
    "awq": ("awq", AWQ, {"batch_size": 1}),
    "gguf rtn": ("gguf", {"type": ("Q8_0",), "solver": "rtn", "imatrix": "none"}, {}),
}


@pytest.mark.parametrize("name", by_day(METHODS, ["nf4", "gptq suspend", "gguf rtn"]))
def test_weights_are_loaded_once_and_in_the_order_of_the_file(name, tiny_model, tmp_path, read):
    """And once more for the model's hash; what is not quantized is copied besides, byte for byte. Rows of
    embedding and head are read when they are needed."""
    method, options, run = METHODS[name]
    model = tiny_model("llama", tokenizer=True, num_hidden_layers=3, tie_word_embeddings=False)
    run = run | ({"calibration": jobs.calibration(tmp_path)} if "batch_size" in run else {})
    out = tmp_path / ("out.gguf" if method == "gguf" else "out")
    jobs.quantize(method, model, out, options, **run)
    source = open_checkpoint(str(model))
    outside = {"model.embed_tokens.weight", "lm_head.weight"} if method != "gguf" else set()
    counts = times(read, source, source.infos.keys() - outside)
    kept = {name for name in counts if "_proj" not in name} if method != "gguf" else set()
    if "calibration" in run:  # scales were folded into some norms, which are written as they have become
        kept -= {name for name in kept if "layernorm" in name and counts[name] == 1}
    if method == "awq":  # scaled weights are compared with the source's
        kept |= {name for name in counts if "_proj" in name}
    assert counts == {name: 2 if name in kept else 1 for name in source.infos.keys() - outside}
    if method == "gguf":
        return
    for block in range(3):
        offsets = [offset for file, offset, _ in read if file in {i.file for i in source.infos.values()}]
        own = {i.offset for i in source.infos.values() if f"layers.{block}." in i.name}
        first = [offset for offset in offsets if offset in own][: len(own)]
        assert first == sorted(own)


OUTSIDE = {  # method, options, whether head and embedding are one matrix
    "nf4": ("nf4", {}, True),
    "int8": ("int8", {}, False),
    "fp8": ("fp8", {"solver": "rtn"}, False),
    "gptq": ("gptq", SMALL, True),
}


@pytest.mark.parametrize("name", by_day(OUTSIDE, ["int8", "gptq"]))
def test_no_job_holds_embedding_or_head(name, tiny_model, tmp_path, read, monkeypatch):
    """Of the source, of the original whose loss is measured, and of the output that is verified: at most
    SLICE_BYTES at a time."""
    method, options, tied = OUTSIDE[name]
    model = tiny_model("llama", tokenizer=True, tie_word_embeddings=tied)
    source, skeletons, held = open_checkpoint(str(model)), [], []
    matrices = [info for info in source.infos.values() if "embed" in info.name or "lm_head" in info.name]
    most = matrices[0].nbytes // 8
    monkeypatch.setattr(by_rows, "SLICE_BYTES", most)
    built, run_block = Skeleton.__init__, Skeleton.run_block

    def noted(self, *arguments):
        built(self, *arguments)
        skeletons.append(self)

    def run(self, *arguments):
        parameters = [p for skeleton in skeletons for p in skeleton.model.parameters() if not p.is_meta]
        held.append(sum(parameter.nbytes for parameter in parameters))
        return run_block(self, *arguments)

    monkeypatch.setattr(Skeleton, "__init__", noted)
    monkeypatch.setattr(Skeleton, "run_block", run)
    calibration = {"calibration": jobs.calibration(tmp_path)} if method in ("gptq", "fp8") else {}
    summary = jobs.quantize(method, model, tmp_path / "out", options, loss_tokens=32, **calibration)
    assert summary.loss.tokens == 32 and len(held) >= 3 * len(skeletons[0].blocks)
    assert max(held) < most  # norms
    copied = [(info.file, info.offset, info.nbytes) for info in matrices]
    for info in matrices:
        pieces = [piece for piece in read if piece not in copied and piece[0] == info.file]
        pieces = [piece for piece in pieces if info.offset <= piece[1] < info.offset + info.nbytes]
        assert max(nbytes for *_, nbytes in pieces) == most
        assert sum(nbytes for *_, nbytes in pieces) >= 2 * info.nbytes
    assert sorted(piece for piece in read if piece in copied) == sorted(copied)


def test_embedding_and_head_on_disk_compute_what_those_in_memory_do(tiny_model, monkeypatch):
    for kind, sizes in (("llama", {}), ("gemma3", {}), ("gpt2", {})):
        checkpoint = open_checkpoint(str(tiny_model(kind, **sizes)))
        loaded, on_disk = (Skeleton(checkpoint, torch.bfloat16, CPU) for _ in range(2))
        loaded.load_rest()
        monkeypatch.setattr(by_rows, "SLICE_BYTES", 10_000)
        on_disk.load_rest(away=True)
        assert on_disk.model.get_input_embeddings().weight.is_meta
        ids = torch.tensor([[3, 511, 3, 0]])
        assert torch.equal(on_disk.embed(ids), loaded.embed(ids))
        hidden = torch.randn(5, 64).bfloat16()
        torch.testing.assert_close(on_disk.logits(hidden), loaded.logits(hidden))


def test_a_tensor_of_a_large_file_needs_no_more_memory_than_its_own(tmp_path):
    """Under `ulimit -v`: the file is larger than the address space that is left, most of it a hole."""
    path, gigabytes = tmp_path / "model.safetensors", 4 << 30
    header = {
        "small": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "large": {"dtype": "U8", "shape": [gigabytes], "data_offsets": [16, 16 + gigabytes]},
    }
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + torch.arange(4.0).numpy().tobytes())
        file.truncate(8 + len(text) + 16 + gigabytes)
    code = """
import resource, sys
from pathlib import Path
import psutil, torch
from quantkit.models.files import reading, safetensors_folder
most = psutil.Process().memory_info().vms + (1 << 29)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
print(reading.tensor(safetensors_folder.read_header(Path(sys.argv[1]))["small"]).tolist())
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.stdout == "[0.0, 1.0, 2.0, 3.0]\n", done.stderr


@pytest.mark.parametrize(
    "index",
    [
        (2,), (1, slice(None)), (0, slice(1, 3)), (2, slice(0, None, 2)), (1, slice(None), slice(2, 5)),
        (1, slice(1, None, 2), slice(None)), (slice(1, 3),), (2, 3), (0, slice(4, 4)),
    ],
)  # fmt: skip
def test_a_part_is_what_indexing_gives_and_no_more_is_read(index, tmp_path, read):
    values = torch.randn(3, 4, 5).bfloat16()
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(6) + values.view(torch.uint8).numpy().tobytes())
    info = safetensors_folder.TensorInfo("experts", "BF16", (3, 4, 5), path, 6, values.nbytes)
    assert torch.equal(reading.tensor(info, index), values[index])
    rows = values[index[0]][index[1]] if len(index) > 1 else values[index[0]]
    steps = len(index) > 1 and isinstance(index[1], slice) and index[1].step
    most = values[0].nbytes if steps else rows.nbytes
    assert sum(nbytes for *_, nbytes in read) <= most


@pytest.mark.parametrize("first", [0, 1_500, None])
def test_embedding_and_head_are_compared_up_to_the_first_difference(first, tiny_model, monkeypatch):
    folder = tiny_model("llama", vocab_size=20_000, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    if first is not None:
        head[first] += 1
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    read, raw = [], safetensors_folder.raw
    monkeypatch.setattr(
        head_of, "raw", lambda info: (read.append(len(piece)) or piece for piece in raw(info))
    )
    checkpoint = open_checkpoint(str(folder))
    assert ("lm_head.weight" in checkpoint.names) == (first is not None)
    most = safetensors_folder.COPY_BYTES
    assert head.nbytes > 2 * most
    pieces = -(-head.nbytes // most) if first is None else first * head[0].nbytes // most + 1
    assert len(read) == 2 * pieces and max(read) == most


# ---- what does not fit


def test_the_largest_tensor_outside_the_blocks_counts_as_it_is_stored(tiny_model):
    checkpoint = open_checkpoint(str(tiny_model("llama")))
    embedding = max(info.nbytes for name, info in checkpoint.infos.items() if "embed" in name)
    for dtype in (torch.float32, torch.bfloat16):
        skeleton = Skeleton(checkpoint, dtype, CPU)
        assert plan.shapes_of(skeleton, linears.linears(skeleton), 64, 64).largest == embedding


def test_verification_holds_no_second_embedding(tiny_model, tmp_path, monkeypatch):
    model, places = tiny_model("llama", tokenizer=True), []
    made = jobs.prepare("nf4", model, tmp_path / "out")
    through = finish.walk.through

    def looked(skeleton, *arguments, **options):
        places.append({parameter.device.type for parameter in made.skeleton.model.parameters()})
        return through(skeleton, *arguments, **options)

    monkeypatch.setattr(finish.walk, "through", looked)
    loop.run([made], Progress())
    assert places == [{"meta"}]


def test_what_cannot_fit_is_refused_before_anything_is_read_with_what_would(
    quantkit, tiny_model, tmp_path, read, monkeypatch
):
    model = tiny_model("llama", tokenizer=True)
    text = jobs.calibration(tmp_path, 16, 64).calibration
    asked = ["gptq", model, "--group-size", 32, "--calibration", text, "--samples", 16, "--seqlen", 64, "-q"]
    asked += ["--loss-tokens", 0]  # it takes more than this job
    monkeypatch.setattr(job.Staging, "check", lambda *_: None)
    smallest = "--json --dry-run --sequential repeat --states disk --batch-size 1".split()
    least = json.loads(quantkit(*asked, *smallest).out)["plan"]["memory_bytes"]
    monkeypatch.setattr(plan, "free_memory", lambda device: least)
    done = quantkit(*asked, "--batch-size", 16)
    error, hint = done.err.splitlines()[-2:]
    assert done.code == 5 and "the job needs about " in error and not read
    options, needs, _ = hint.removeprefix("hint: use ").partition(", with which the job needs about ")
    assert options == "--batch-size 1" and needs
    assert quantkit(*asked, *shlex.split(options), "--dry-run").code == 0


def test_a_limit_that_nothing_fits_names_the_one_that_would(quantkit, tiny_model, tmp_path, read):
    model = tiny_model("llama", tokenizer=True)
    done = quantkit("nf4", model, "--max-memory", "64MB", "-q")
    error, hint = done.err.splitlines()
    assert done.code == 5 and error.startswith("error: --max-memory of 64.00 MB is too small: ") and not read
    assert hint.startswith("hint: use --max-memory ")
    assert quantkit("nf4", model, *shlex.split(hint.removeprefix("hint: use ")), "-q").code == 0
    assert quantkit("nf4", model, "--max-memory", "lots", "-q").code == 2


@pytest.mark.parametrize("command", ["nf4", "gptq", "imatrix", "eval"])
def test_a_limit_is_told_in_figures_of_one_moment_that_add_up(
    command, quantkit, tiny_model, tmp_path, monkeypatch
):
    """The process grows at each look."""
    model = tiny_model("llama", tokenizer="bos")
    looks = iter(range(300 * 10**6, 10**10, 10**9))
    monkeypatch.setattr(memory, "resident", lambda: next(looks))
    text = jobs.calibration(tmp_path, 16, 64).calibration
    calibration = "--calibration", text, "--samples", 16, "--seqlen", 64
    words = {
        "nf4": (),
        "gptq": ("--group-size", 32, *calibration),
        "imatrix": calibration,
        "eval": ("--text", text, "--ctx", 32),
    }
    done = quantkit(command, model, *words[command], "--max-memory", "100MB", "-q")
    error, hint = done.err.splitlines()
    what = "the evaluation" if command == "eval" else "the job"
    told = re.fullmatch(
        "error: --max-memory of 100.00 MB is too small: "
        rf"Python and tokenizer take about 300.00 MB, {what} ([\d.]+) (kB|MB)",
        error,
    )
    need = float(told[1]) * {"kB": 1e3, "MB": 1e6}[told[2]]
    limit = float(re.match(r"hint: use --max-memory ([\d.]+)GB", hint)[1]) * 1e9
    assert done.code == 5 and 315e6 + need <= limit < 315e6 + need + 1e8


def test_a_limit_above_what_the_machine_has_is_not_blamed(quantkit, tiny_model, monkeypatch):
    monkeypatch.setattr(plan, "room", lambda: Room(1000))
    monkeypatch.setattr(plan, "free_memory", lambda device: 1000)
    done = quantkit("nf4", tiny_model("llama"), "--max-memory", "50GB", "-q")
    error, hint = done.err.splitlines()
    assert done.code == 5 and "1.00 kB are" in error and "--max-memory" not in error
    assert hint == "hint: use a machine with more memory: no option makes it fit"


@pytest.mark.parametrize(("free", "words"), [(1000, "no option makes it fit"), (150e6, "--loss-tokens 0")])
def test_where_calibration_does_not_decide_the_peak_its_flags_are_not_named(
    quantkit, tiny_model, monkeypatch, free, words
):
    """Predictions for a large vocabulary take more than all else."""
    monkeypatch.setattr(plan, "room", lambda: Room(free))
    monkeypatch.setattr(plan, "free_memory", lambda device: free)
    model = tiny_model("llama", tokenizer=True, vocab_size=60000)
    done = quantkit("gptq", model, "--samples", "8", "--seqlen", "32", "-q")
    assert done.code == 5 and words in done.err.splitlines()[-1]


def test_an_evaluation_that_cannot_fit_is_refused_before_anything_is_read(
    quantkit, tiny_model, tmp_path, read
):
    model = tiny_model("llama", tokenizer="bos")
    text = jobs.calibration(tmp_path).calibration
    done = quantkit("eval", model, "--text", text, "--ctx", 32, "--max-memory", "64MB", "-q")
    assert done.code == 5 and ", the evaluation " in done.err and not read
    found = done.err.splitlines()[-1].removeprefix("hint: use ")
    assert found.startswith("--max-memory ")
    done = quantkit("eval", model, "--text", text, "--ctx", 32, *shlex.split(found), "-q")
    assert done.code == 0
    done = quantkit("eval", model, "--text", text, "--ctx", 32, "--max-memory", "0", "-q")
    assert done.code == 2
