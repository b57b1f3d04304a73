"""Run pieces of a tensor through a chain of operations, one piece per torch thread at a time.

torch splits each operation over its threads. Every operation then has a hand-over, and the data leaves the
cache between two operations. Here a thread takes one piece through the whole chain. Operations release the
interpreter's lock, so Python threads suffice. Results do not depend on the number of threads, because a piece
is some rows, and each row is computed alone.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

CACHEFUL = 1 << 18  # elements a CPU core works on at a time: what its cache holds, with a few temporaries
WHOLE = 1 << 26  # the same on an accelerator, where every piece is another launch of every operation

_worker = threading.local()


def rows_at_once(device: torch.device, width: int, temporaries: int = 1) -> int:
    """Return how many rows of `width` elements go through a chain of operations at once.

    temporaries: number of tensors of that size that the chain uses at the same time.
    """
    elements = (CACHEFUL if device.type == "cpu" else WHOLE) // temporaries
    return max(1, elements // max(1, width))


def rows_per_piece(device: torch.device, width: int) -> int:
    """Return how many rows of `width` elements make a piece. Several threads take larger ones: between two
    operations a thread needs the interpreter's lock, and waiting for it costs more than a fuller cache."""
    several = torch.get_num_threads() > 1 or getattr(_worker, "busy", False)
    return rows_at_once(device, width) * (2 if several else 1)


def for_each(work: Callable[..., None], pieces: Sequence[tuple]) -> None:
    """Run `work(*piece)` for every piece, in any order. After an exception no further piece is started, and
    the first exception is raised. Pieces on an accelerator stay in the caller's thread: another thread has
    another stream, and a CUDA graph would not record its work."""
    inference = torch.is_inference_mode_enabled()
    threads = min(torch.get_num_threads(), len(pieces))
    alone = threads < 2 or getattr(_worker, "busy", False)
    if alone or any(isinstance(part, Tensor) and not part.is_cpu for part in pieces[0]):
        for piece in pieces:
            work(*piece)
        return
    waiting = iter(pieces)  # a list's iterator hands out each piece once, whoever asks

    def take() -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():  # modes belong to a thread
                for piece in waiting:
                    work(*piece)
        except BaseException:
            for _ in waiting:
                pass
            raise

    workers = [_pool(torch.get_num_threads()).submit(take) for _ in range(threads)]
    wait(workers)  # all of them, before an error is raised: none may write after the caller returned
    for worker in workers:
        worker.result()


def by_chunks(work: Callable[[slice], T], weight: Tensor) -> list[T]:
    """Return the results of `work` on slices of the rows of `weight [rows, in]` that fit the cache, in
    order."""
    rows = rows_per_piece(weight.device, weight.shape[1])
    slices = [slice(start, start + rows) for start in range(0, len(weight), rows)]
    results: list = [None] * len(slices)

    def put(index: int, _: Tensor) -> None:
        results[index] = work(slices[index])

    for_each(put, [(index, weight) for index in range(len(slices))])
    return results


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(threads, "quantkit", _serial)
    everyone = threading.Barrier(threads)
    try:
        for ready in [pool.submit(everyone.wait) for _ in range(threads)]:
            ready.result()
    except BaseException:  # asked to stop: who waits here for ever would keep the process from ending
        everyone.abort()
        raise
    torch.set_num_threads(threads)  # the workers' own setting is what later threads would start with
    return pool


os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork has the pool, but not its threads


def _serial() -> None:
    torch.set_num_threads(1)
    torch.get_num_threads()  # makes it this thread's own: at its first use it would take the latest setting
    _worker.busy = True
