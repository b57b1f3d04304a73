"""How much each input of a linear counts: its mean square over calibration text, in the unquantized model.

The hidden states flow block by block as in the loop, through blocks that stay as they are: one block is in
memory at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from quantkit.models.machine import distributed
from quantkit.models.machine.memory import map_large_blocks
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import capture, walk
from quantkit.quantize.calibrate.sites import PROBE_TOKENS, find_sites
from quantkit.quantize.calibrate.states import Place, States, embedded
from quantkit.quantize.prepare.linears import linears
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers import SiteStatistics
from quantkit.quantize.timings import Timings


@dataclass(frozen=True)
class Importance:
    """sums: by stored name of a linear, Σx² of each input column, float32 `[in]`, over so many `tokens`:
    fewer for an expert."""

    sums: dict[str, Tensor]
    tokens: dict[str, int]


def gather(
    skeleton: Skeleton,
    batches: Sequence[Tensor],
    progress: Progress | None = None,
    timings: Timings | None = None,
    place: Place | None = None,
) -> Importance:
    """What enters the linears while `batches` of token ids `[batch, tokens]` go through the checkpoint, those
    of all ranks; each gives its own. place: where states wait, if that was planned.

    Loads all of the skeleton but its blocks. Raises QuantkitError for activations that are not finite.
    """
    progress, timings = progress or Progress(), timings or Timings(skeleton.device)
    map_large_blocks()
    with timings("load"):
        skeleton.load_rest()
    states = embedded(batches, skeleton.embed, skeleton.device, place)
    names = {(row.block, row.local): row.name for row in linears(skeleton)}
    sums: dict[str, Tensor] = {}
    tokens: dict[str, int] = {}
    progress.start(len(skeleton.blocks), 0)
    for index, block in walk.blocks(skeleton, lambda index: (None, True), timings):
        for local, (found, count) in _block(skeleton, index, block, states, timings).items():
            sums[names[index, local]], tokens[names[index, local]] = found, count
        progress.block(index, replayed=False)
    return Importance(sums, tokens)


def _block(
    skeleton: Skeleton, index: int, block: nn.Module, states: States, timings: Timings
) -> dict[str, tuple[Tensor, int]]:
    """Σx² and tokens by name inside block `index`; `states` become the block's outputs."""
    probe = distributed.broadcast(lambda: states[0][:1, :PROBE_TOKENS].clone())
    sites = find_sites(block, lambda: skeleton.run_block(index, probe))
    sites = [site for site in sites if site.linears]
    outputs = skeleton.outputs(index, states)
    with timings("forward"):
        gathered = capture.gather(block, sites, {"square"}, skeleton.device, lambda: states.advance(outputs))
    found = {}
    for site, sums in gathered.items():
        name = skeleton.names.stored_of(index, f"{site.linears[0]}.weight")
        capture.refuse_not_finite(sums.finish(), name.removesuffix(".weight"), str(skeleton.dtype)[6:])
        found |= dict.fromkeys(site.linears, (sums.square_sums().float(), sums.tokens))
    return found


def of_head(skeleton: Skeleton, batches: Sequence[Tensor], place: Place | None = None) -> SiteStatistics:
    """Second moments of what enters the output matrix, from one pass through the blocks as they are. place:
    where states wait, if that was planned.

    What lies outside the blocks is loaded. Raises QuantkitError for activations that are not finite.
    """
    states = walk.through(skeleton, batches, decoded=True, place=place)
    head = skeleton.model.get_output_embeddings()
    sums = capture.Statistics(head.in_features, skeleton.device, ("hessian",))

    def record(module: nn.Module, inputs: tuple[Tensor]) -> None:
        sums.add(inputs[0])
        raise _Seen  # its product with the vocabulary is not needed

    handle = head.register_forward_pre_hook(record)
    try:
        for hidden in states:
            for sequence in hidden:
                with contextlib.suppress(_Seen):
                    skeleton.logits(sequence)
    finally:
        handle.remove()
    statistics = sums.finish()
    capture.refuse_not_finite(statistics, "the output matrix", str(skeleton.dtype)[6:])
    return statistics


class _Seen(Exception):
    """Ends a forward pass at the output matrix."""
