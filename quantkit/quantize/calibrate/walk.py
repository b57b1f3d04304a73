"""The walk over a model's blocks: load, use, free, one at a time. All that runs blocks goes this way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

from torch import Tensor, nn

from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.machine.device import is_accelerator
from quantkit.models.skeleton import FetchedBlock, Skeleton
from quantkit.quantize.calibrate.states import Place, States, embedded
from quantkit.quantize.timings import Timings

# Where a block is read from (None: the skeleton's own checkpoint), and `decoded`: see `Skeleton.load_block`.
Source = tuple[Checkpoint | None, bool]


def blocks(
    skeleton: Skeleton,
    source: Callable[[int], Source],
    timings: Timings | None = None,
    only: Sequence[int] | None = None,
) -> Iterator[tuple[int, nn.Module]]:
    """Every block with its index, or `only` these, loaded for as long as the caller looks at it and freed
    then.

    source: what `Skeleton.load_block` is to read for a block. On an accelerator the next block is read from
    the disk meanwhile, into pinned memory of the host; the copy from there takes hundredths of a second, and
    doing that ahead, too, would hold two blocks on the device.
    """
    timings, wanted = timings or Timings(), range(len(skeleton.blocks)) if only is None else only
    with closing(_Reader(skeleton)) as reader:
        for place, index in enumerate(wanted):
            with timings("load"):
                block = skeleton.load_block(index, *source(index), reader.result())
            for following in wanted[place + 1 : place + 2]:
                reader.begin(following, source(following))
            yield index, block
            skeleton.free_block(index)


def through(
    skeleton: Skeleton,
    batches: Sequence[Tensor],
    decoded: bool = False,
    entered: Callable[[int], None] = lambda index: None,
    place: Place | None = None,
) -> States:
    """Final hidden states of every batch of ids `[batch, tokens]`; what lies outside the blocks is loaded.

    entered: may change a block, by its index, once it is loaded. decoded: see `Skeleton.load_block`. place:
    where states wait, if that was planned.
    """
    states = embedded(batches, skeleton.embed, skeleton.device, place)
    for index, _ in blocks(skeleton, lambda index: (None, decoded)):
        entered(index)
        states.advance(skeleton.outputs(index, states))
    return states


class _Reader:
    """Reads one block ahead, where a device of its own computes."""

    def __init__(self, skeleton: Skeleton):
        self._skeleton = skeleton
        self._pool = ThreadPoolExecutor(1, "reader") if is_accelerator(skeleton.device) else None
        self._reading: Future[FetchedBlock] | None = None

    def begin(self, index: int, source: Source) -> None:
        if self._pool:
            self._reading = self._pool.submit(self._skeleton.fetch_block, index, *source)

    def result(self) -> FetchedBlock | None:
        """What was begun; None where nothing was."""
        return self._reading.result() if self._reading else None

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
