"""Experts of a block are read when they are called and given up again: no job holds them all."""

import families
import jobs
import pytest
import torch
from nights import by_day, nightly
from sums import assert_sums

from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine import expert_share
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.streaming import Keeper
from quantkit.quantize import loop
from quantkit.quantize.prepare import plan
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import parts
from quantkit.quantize.staging.folder import Staging

IDS = torch.arange(40).view(5, 8) * 5 % 90 + 4
EXPERTS = 4
WIDE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_local_experts": EXPERTS}
SMALL = {"group_size": 32, "refine": 0}
AWQ = {"group_size": 32, "candidates": 4}


@pytest.fixture
def mixture(tmp_path):
    def make(family: str = "mixtral", **sizes):
        place = families.save_model(tmp_path / family, family, **(sizes or WIDE))
        families.save_tokenizer(place)
        return place

    return make


@pytest.fixture
def reads(monkeypatch):
    """Names of linears in the order in which keepers read them; none holds more than two experts."""
    found, read = [], Keeper._read

    def listen(self, local):
        assert self.weights + self._block.get_submodule(local).weight.numel() <= 2 * 3 * 64 * 64
        found.append(local)
        read(self, local)

    monkeypatch.setattr(Keeper, "_read", listen)
    return found


@pytest.fixture
def resident(monkeypatch):
    """Jobs that load whole blocks."""

    def use():
        monkeypatch.setattr(expert_share, "streams", lambda nbytes, free: False)

    return use


def skeleton_of(folder, streams: bool = True) -> Skeleton:
    skeleton = Skeleton(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"))
    skeleton.streams = streams
    skeleton.load_rest()
    return skeleton


def outputs(folder, streams: bool) -> list[torch.Tensor]:
    skeleton = skeleton_of(folder, streams)
    hidden = [skeleton.embed(row[None]) for row in IDS]
    skeleton.load_block(0)
    found = list(skeleton.outputs(0, hidden))
    skeleton.free_block(0)
    assert all(parameter.is_meta for parameter in skeleton.blocks[0].parameters())
    return found


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_streamed_experts_compute_what_loaded_ones_do(family, mixture):
    folder = mixture(family, hidden_size=64, num_hidden_layers=1)
    for one, other in zip(outputs(folder, True), outputs(folder, False), strict=True):
        assert_sums(one, other)


def test_several_batches_read_an_expert_once(mixture, reads, monkeypatch):
    """Five batches go four at a time; an expert without tokens is not read."""
    monkeypatch.setattr(expert_share, "IN_STEP", 4)
    outputs(mixture(), True)
    assert len(reads) <= 2 * 3 * EXPERTS
    first = reads[: len(set(reads))]
    assert (
        len(set(first)) == len(first) and [name for name in first if name.endswith("w2")] == first[-EXPERTS:]
    )


METHODS = {
    "gptq": ("gptq", SMALL, {"sequential": "suspend"}),
    "gptq repeat": ("gptq", jobs.GPTQ, {"sequential": "repeat"}),
    "gptq packed": ("gptq", jobs.GPTQ | {"layout": "compressed-tensors"}, {}),
    "nf4": ("nf4", {}, {}),
    "int8": ("int8", {}, {"allow_unread": True}),
    "awq": ("awq", AWQ, {"exclude": (r"experts\.1\.", r"experts\.2\.w2", r"experts\.3\.w3")}),
    "awq gptq": ("awq", AWQ | {"solver": "gptq"}, {}),
}


@pytest.mark.parametrize("method", by_day(METHODS, ["gptq repeat", "awq gptq"]))
def test_a_job_that_streams_writes_the_bytes_of_one_that_does_not(
    method, mixture, tmp_path, reads, resident, monkeypatch
):
    """Also where codes are staged one linear at a time, and read again from there."""
    folder, text = mixture(), jobs.calibration(tmp_path)
    name, options, run = METHODS[method]
    arguments = {"calibration": text, "batch_size": 2} | run
    with monkeypatch.context() as patch:
        patch.setattr(parts, "PART_BYTES", 1)
        jobs.quantize(name, folder, tmp_path / "streamed" / "out", options, **arguments)
    assert reads
    reads.clear()
    resident()
    jobs.quantize(name, folder, tmp_path / "resident" / "out", options, **arguments)
    assert not reads
    one, other = (jobs.contents(tmp_path / place / "out") for place in ("streamed", "resident"))
    assert one.keys() == other.keys()
    assert [file for file in one if one[file] != other[file]] == []


def test_experts_that_stay_in_16_bit_are_read_once_for_all_batches(mixture, tmp_path, reads):
    """The probe, the sample that a transform goes by, the pass, and that of the verification; of the original
    a probe and a pass."""
    jobs.quantize(
        "gptq", mixture(), tmp_path / "out", SMALL, calibration=jobs.calibration(tmp_path), batch_size=2,
        sequential="suspend", exclude=(r"experts\.[1-5]\.",),
    )  # fmt: skip
    assert len(reads) <= 6 * 3 * EXPERTS


def test_a_repeated_forward_takes_as_many_experts_as_the_plan_allows(mixture, tmp_path, monkeypatch):
    """The same bytes whether one site at a time is measured or all: where there is room, in fewer passes."""
    folder, text = mixture(), jobs.calibration(tmp_path)
    passes, run_block = [], Skeleton.run_block

    def count(self, index, hidden):
        passes[-1] += 1
        return run_block(self, index, hidden)

    def quantize(name: str, free: int) -> tuple[int, int]:
        with monkeypatch.context() as patch:
            patch.setattr(plan, "free_memory", lambda device: free)
            run = {"calibration": text, "sequential": "repeat", "batch_size": 2}
            made = jobs.prepare("gptq", folder, tmp_path / name / "out", SMALL, **run)
        passes.append(0)
        with monkeypatch.context() as patch:
            patch.setattr(Skeleton, "run_block", count)
            loop.run([made], Progress())
        return made.plan.execution.at_once, made.plan.memory_bytes

    at_once, need = quantize("one", 1 << 40)
    assert at_once == EXPERTS + 1
    assert quantize("few", int((need - (at_once - 1) * 4 * 64 * 64) / 0.8) + 10)[0] == 1
    one, few = (jobs.contents(tmp_path / name / "out") for name in ("one", "few"))
    assert [file for file in one if one[file] != few[file]] == []
    assert passes[1] - passes[0] == 3 * 2 * EXPERTS  # of three batches, once for each site and not for all


@pytest.mark.parametrize("lost", [True, *nightly(False)])
def test_a_block_that_is_half_staged_is_made_again(lost, mixture, tmp_path, monkeypatch):
    """The second block's parts are on the disk when the job dies, and one of the first block's gets lost."""
    folder = mixture("mixtral", **WIDE | {"num_hidden_layers": 2})
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    arguments = {"calibration": jobs.calibration(tmp_path), "sequential": "suspend"}
    jobs.quantize("gptq", folder, tmp_path / "whole" / "out", jobs.GPTQ, **arguments)
    cut = tmp_path / "cut" / "out"
    with jobs.interrupted(before=1):
        jobs.quantize("gptq", folder, cut, jobs.GPTQ, **arguments)
    staged = sorted(path.name for path in cut.with_suffix(".partial").glob("part-*"))
    assert len([name for name in staged if name.startswith("part-00001-")]) == 4 + 3 * EXPERTS
    if lost:
        (cut.with_suffix(".partial") / staged[0]).unlink()
    assert Staging(cut).is_done(0) != lost and not Staging(cut).is_done(1)
    jobs.quantize("gptq", folder, cut, jobs.GPTQ, resume=True, **arguments)
    one, other = (jobs.contents(tmp_path / place / "out") for place in ("whole", "cut"))
    assert [file for file in one if one[file] != other[file]] == []
