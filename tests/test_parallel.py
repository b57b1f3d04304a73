"""quantkit.grids.parallel: every piece once, whatever the number of threads."""

import threading
import time

import pytest
import torch

from quantkit.grids import grid, parallel
from quantkit.grids.nf4 import Nf4Grid
from quantkit.quantize.solvers import rtn


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_piece_once_on_all_threads(threads):
    seen, workers = [], set()

    def work(a: int, b: int) -> None:
        time.sleep(0.002)  # a chance for the others
        seen.append((a, b, torch.get_num_threads()))
        workers.add(threading.get_ident())

    parallel.for_each(work, [(k, -k) for k in range(60)])
    assert sorted(seen) == [(k, -k, 1) for k in range(60)]
    assert len(workers) == threads and torch.get_num_threads() == threads


def test_an_error_ends_it(threads):
    seen = []

    def work(k: int) -> None:
        if k == 5:
            raise KeyError(k)
        time.sleep(0.002)
        seen.append(k)

    with pytest.raises(KeyError):
        parallel.for_each(work, [(k,) for k in range(500)])
    assert len(seen) < 20
    parallel.for_each(seen.append, [(-1,)] * 3)  # and leaves the threads fit for more
    assert seen[-3:] == [-1] * 3


def test_pieces_of_a_piece(threads):
    seen = []
    parallel.for_each(lambda a: parallel.for_each(lambda b: seen.append((a, b)), [(0,), (1,)]), [(0,), (1,)])
    assert sorted(seen) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_what_comes_out_does_not_depend_on_threads(threads, monkeypatch):
    weight = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    wanted = rtn.quantize(weight, Nf4Grid(double_quant=False))
    monkeypatch.setattr(parallel, "CACHEFUL", 1 << 10)
    found = rtn.quantize(weight, Nf4Grid(double_quant=False))
    assert torch.equal(found.codes, wanted.codes) and torch.equal(found.params.absmax, wanted.params.absmax)
    assert torch.equal(found.values(), wanted.values())


@pytest.mark.parametrize("damage", [None, torch.nan, torch.inf, -torch.inf])
def test_is_finite(threads, damage):
    for shape in [(7,), (40, 30), (5, 6, 7)]:
        tensor = torch.full(shape, 3e38)  # its sum overflows
        if damage is not None:
            tensor.view(-1)[5] = damage
        assert grid.is_finite(tensor) == (damage is None)


def test_threads_begun_when_asked_to_stop_can_end(monkeypatch):
    """Those that wait for the others would keep the process from ending."""
    pools = []

    class Stopped(parallel.ThreadPoolExecutor):
        def submit(self, *arguments):
            pools.append(self)
            if len(pools) == 2:
                raise KeyboardInterrupt
            return super().submit(*arguments)

    monkeypatch.setattr(parallel, "ThreadPoolExecutor", Stopped)
    with pytest.raises(KeyboardInterrupt):
        parallel._pool.__wrapped__(2)
    ended = threading.Thread(target=pools[0].shutdown, daemon=True)
    ended.start()
    ended.join(20)
    assert not ended.is_alive()
