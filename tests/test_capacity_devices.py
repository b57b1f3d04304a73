"""Devices by name, and what their numbers allow."""

import pytest
from speed_of_tests import SPEED

from quantkit.capacity import devices
from quantkit.capacity.question import Question
from quantkit.errors import QuantkitError
from quantkit.models.machine import memory

GIB = 1 << 30


def test_the_roofline_of_an_a100():
    """The published 100.3 at one byte per weight."""
    a100 = devices.find("a100-40g")
    flops, bandwidth = a100.tflops * 1e12, a100.bandwidth_gbs * 1e9
    assert devices.optimal_batch(flops, bandwidth, 1) == pytest.approx(100.3, abs=0.05)
    assert devices.optimal_batch(flops, bandwidth, 2) == pytest.approx(200.6, abs=0.1)


@pytest.mark.parametrize(
    "text, name",
    [
        ("a100-40g", "a100-40g"),
        ("GeForce RTX 5090", "rtx-5090"),
        ("h100_80GiB", "h100-80g"),
        ("CPU", "cpu"),
        ("NVIDIA H100 PCIe 80GB", "h100-pcie-80g"),
        ("4070ti", "rtx-4070-ti"),
        ("RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        # as nvidia-smi prints them
        ("Tesla V100-SXM2-16GB", "v100-16g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA GeForce RTX 4070 Ti", "rtx-4070-ti"),
    ],
)
def test_spellings(text, name):
    assert devices.find(text).name == name


@pytest.mark.parametrize(
    "text, words",
    [
        ("a100", "did you mean a100-40g or a100-80g?"),
        ("h200-80g", "did you mean h100-80g"),
        ("rtx-3070", "rtx-3090"),
        ("abacus", "known: v100-16g"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti"),
        ("NVIDIA H100 NVL", "h100"),
        ("NVIDIA A100-SXM-64GB", "a100-40g"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(text, words):
    with pytest.raises(QuantkitError, match="unknown device") as refused:
        devices.find(text)
    assert words in refused.value.hint and "--vram" in refused.value.hint and refused.value.exit_code == 2


def test_numbers_of_a_device_can_be_said():
    mine = Question(gpu="l4", vram=20).device
    assert (mine.memory_bytes, mine.bandwidth_gbs, mine.tflops) == (20 * GIB, 300, 121)
    custom = Question(vram=48, bandwidth=960).device
    found = custom.name, custom.memory_bytes, custom.bandwidth_gbs, custom.tflops
    assert found == ("custom", 48 * GIB, 960, None)
    assert Question().device is None
    both = Question(gpu="l4", vram=20, gpus=2)
    two = both.device
    assert (two.name, two.memory_bytes, two.bandwidth_gbs, two.tflops) == ("2 × l4", 40 * GIB, 600, 242)
    assert both.single_device == mine and mine.count == 1
    for said in ({"vram": 0}, {"bandwidth": -1}, {"tflops": float("nan")}, {"vram": float("inf")}):
        with pytest.raises(QuantkitError, match="is invalid"):
            Question(gpu="t4", **said).check()


def test_the_cpu_is_this_machine(monkeypatch):
    monkeypatch.setattr(memory, "room", lambda: memory.Room(7 * GIB))
    question = Question(gpu="cpu", threads=1)
    mine = question.device
    assert mine.memory_bytes == 7 * GIB and question.memory == int(0.9 * 7 * GIB)
    assert mine.bandwidth_gbs == pytest.approx(1e-9 / SPEED.byte)
    assert mine.tflops in (pytest.approx(0.8), pytest.approx(2e-12 / SPEED.float32))
    assert Question(gpu="cpu", threads=4).device.tflops == pytest.approx(mine.tflops / (0.05 + 0.95 / 4))


def test_types_of_fewer_bits():
    """Twice as fast for half the bits, where tensor cores have the type and adding up is no slower."""
    h100, rtx, b200, a100 = (devices.find(name) for name in ("h100-80g", "rtx-4090", "b200", "a100-80g"))
    assert h100.peak("fp8") == 1979 and h100.peak("fp4") == h100.peak("16 bit") == 989
    assert rtx.peak("fp8") == 2 * rtx.tflops == 330 and rtx.peak("int8") == 661
    assert b200.peak("fp4") == 2 * b200.peak("fp8") == 4 * b200.tflops == 9000
    assert a100.peak("fp8") == 312 and a100.peak("int8") == 624
    assert Question(gpu="h100-80g", gpus=2).device.peak("fp8") == 2 * 1979
    assert Question(gpu="h100-80g", tflops=500).device.peak("fp8") == 500  # said: of all types
    for device in devices.DEVICES.values():
        assert all(
            1.9 < tflops / device.tflops < 4.2 or name == "fp4" for name, tflops in device.fewer.items()
        )
