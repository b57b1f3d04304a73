"""Walk over a model's blocks: load, use and free one at a time."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

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
    source: Callable[[int], Source] = lambda index: (None, True),
    timings: Timings | None = None,
    only: Sequence[int] | None = None,
) -> Iterator[tuple[int, nn.Module]]:
    """Yield every block, or only some, with its index; a block is freed when the next one is loaded.

    source: returns the arguments of `Skeleton.load_block` for a block; by default it is decoded from the
    skeleton's checkpoint. On an accelerator the next block is read from disk into pinned host memory
    meanwhile. It is not copied ahead: the device would hold two blocks to save hundredths of a second.
    """
    timings, indices = timings or Timings(), range(len(skeleton.blocks)) if only is None else only
    ahead: Future[FetchedBlock] | None = None
    with ThreadPoolExecutor(1, "reader") as pool:
        for position, index in enumerate(indices):
            with timings("load"):
                block = skeleton.load_block(index, *source(index), ahead.result() if ahead else None)
            if is_accelerator(skeleton.device) and position + 1 < len(indices):
                following = indices[position + 1]
                ahead = pool.submit(skeleton.fetch_block, following, *source(following))
            yield index, block
            skeleton.free_block(index)


def through(
    skeleton: Skeleton,
    batches: Sequence[Tensor],
    decoded: bool = False,
    entered: Callable[[int], None] = lambda index: None,
    place: Place | None = None,
) -> States:
    """Return the final hidden states of every batch of ids `[batch, tokens]`. All but the blocks is loaded.

    entered: called with a block's index after the block is loaded; may change it. decoded: see
    `Skeleton.load_block`. place: where hidden states are kept; None: by free memory.
    """
    states = embedded(skeleton, batches, place)
    for index, _ in blocks(skeleton, lambda index: (None, decoded)):
        entered(index)
        states.advance(skeleton.outputs(index, states))
    return states
