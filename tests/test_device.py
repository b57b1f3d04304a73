"""What a device lacks is noted once for each job, and the job goes on; devices are mocked."""

import sys
from contextlib import contextmanager

import pytest
import torch

from quantkit.errors import QuantkitError
from quantkit.grids.affine import AffineGrid
from quantkit.models.machine import device
from quantkit.quantize.solvers import columns

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def notes(monkeypatch):
    device._tried.cache_clear()
    monkeypatch.setattr(device, "fallbacks", [])
    yield lambda: device.fallbacks
    device._tried.cache_clear()


def test_without_triton_each_job_says_so(monkeypatch, notes):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setitem(sys.modules, "triton.errors", None)
    for _ in range(2):
        assert columns.chain_for(GPU, AffineGrid(4, 128)) is None
        assert columns.chain_for(GPU, AffineGrid(4, 128)) is None
        (note,) = notes()
        assert note.startswith("error feedback takes longer without the Triton kernel: ")
        notes().clear()
    assert columns.chain_for(torch.device("cpu"), AffineGrid(4, 128)) is None and not notes()


class Compiler:
    """Stands for `triton.errors`."""

    class TritonError(Exception):
        pass


@pytest.mark.parametrize("error", [RuntimeError("no C compiler"), Compiler.TritonError("no C compiler")])
def test_a_kernel_is_tried_once_in_a_process_and_noted_again(monkeypatch, notes, error):
    monkeypatch.setitem(sys.modules, "triton", Compiler)
    monkeypatch.setitem(sys.modules, "triton.errors", Compiler)
    tried = []

    def load(where):
        tried.append(where)
        raise error

    for _ in range(2):
        assert device.triton_kernel(GPU, load) is None
        assert notes() == ["error feedback takes longer without the Triton kernel: no C compiler"]
        notes().clear()
    assert tried == [GPU]
    assert device.triton_kernel(GPU, str) == "cuda" and not notes()


def test_memory_that_ran_out_says_nothing_of_the_kernel(monkeypatch, notes):
    monkeypatch.setitem(sys.modules, "triton", Compiler)
    monkeypatch.setitem(sys.modules, "triton.errors", Compiler)

    def load(where):
        raise torch.OutOfMemoryError("full")

    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            device.triton_kernel(GPU, load)
    assert not notes()


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), torch.OutOfMemoryError("full")])
def test_a_recording_that_fails_restores_the_stream(monkeypatch, notes, error):
    streams = ["the job's"]

    @contextmanager
    def graph(graph, pool, capture_error_mode):
        streams.append("the recording's")
        yield
        raise error  # as `capture_end` does

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            device.record_graph(lambda: 1, "pool")
        assert not notes()
    else:
        assert device.record_graph(lambda: 1, "pool") is None
        assert streams[-1] == "the job's"
        assert notes() == ["error feedback takes longer without CUDA graphs: operation not permitted"]


def test_a_device_with_a_number_is_the_current_one(monkeypatch):
    """Graphs and kernels run on the current device, whatever tensors they are given."""
    chosen, module = [], torch.cuda
    monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(module, "set_device", chosen.append)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    assert device.choose_device("cuda:1") == torch.device("cuda:1") == chosen[0]
    device.choose_device("cuda")
    assert len(chosen) == 1
    monkeypatch.undo()
    with pytest.raises(QuantkitError):
        device.choose_device("cuda:99")
