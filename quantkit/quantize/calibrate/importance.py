"""Importance of each input of a linear: its mean square on calibration text, in the unquantized model.

Hidden states pass through the blocks as in the loop, with one block in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantkit.layouts import Statistic
from quantkit.models.machine import distributed
from quantkit.models.machine.memory import map_large_blocks
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.linears import linears
from quantkit.quantize.calibrate import capture, head_every, walk
from quantkit.quantize.calibrate.forwards import repeated
from quantkit.quantize.calibrate.sites import PROBE_TOKENS, find_sites
from quantkit.quantize.calibrate.states import Place, States, embedded
from quantkit.quantize.calibrate.statistics import SiteStatistics
from quantkit.quantize.progress import Progress
from quantkit.quantize.timings import Timings
from quantkit.text.calibration import CalibrationSet

if TYPE_CHECKING:
    from quantkit.models.gguf.imatrix import Imatrix


# By stored name of a linear: Σx² of each input column, float32 `[in]`, and its number of tokens.
Importance = dict[str, tuple[Tensor, int]]


def gather(
    skeleton: Skeleton, batches: Sequence[Tensor], progress: Progress, timings: Timings, place: Place | None
) -> Importance:
    """Return sums of squares of all linears' inputs, over all ranks' batches of token ids `[batch, tokens]`;
    each rank passes its own. place: where hidden states are kept; None: chosen by free memory.

    Loads all of the skeleton but its blocks. Raises QuantkitError if activations are not finite.
    """
    map_large_blocks()
    with timings("load"):
        skeleton.load_rest()
    states = embedded(skeleton, batches, place)
    names = {(spec.block, spec.local): spec.name for spec in linears(skeleton)}
    gathered: Importance = {}
    progress.start(len(skeleton.blocks), 0)
    for index, block in walk.blocks(skeleton, timings=timings):
        of_block = _block(skeleton, index, block, states, timings)
        gathered |= {names[index, local]: importance for local, importance in of_block.items()}
        progress.block(index, replayed=False)
    return gathered


def _block(skeleton: Skeleton, index: int, block: nn.Module, states: States, timings: Timings) -> Importance:
    """Return the importance by name in block `index`. `states` are replaced by the block's outputs."""
    probe = distributed.broadcast(lambda: states[0][:1, :PROBE_TOKENS].clone())
    sites = find_sites(block, lambda: skeleton.run_block(index, probe))
    sites = [site for site in sites if site.linears]
    outputs = skeleton.outputs(index, states)
    with timings("forward"):
        needs = {Statistic.SQUARE}
        gathered = {site: capture.SiteSums(site.in_features, skeleton.device, needs) for site in sites}
        capture.gather(block, gathered, lambda: states.advance(outputs))
    measured = {}
    for site, sums in gathered.items():
        name = skeleton.names.stored_of(index, f"{site.linears[0]}.weight")
        sums.finish().refuse_not_finite(name.removesuffix(".weight"), str(skeleton.dtype)[6:])
        squares = sums.sums[Statistic.SQUARE].total().float()
        measured |= dict.fromkeys(site.linears, (squares, sums.tokens))
    return measured


def of_head(skeleton: Skeleton, batches: Sequence[Tensor], place: Place | None = None) -> SiteStatistics:
    """Return second moments of the output matrix's inputs, from a pass of every n-th batch (`head_every`)
    through the unquantized blocks. place: where hidden states are kept; None: chosen by free memory.

    Everything but the blocks must be loaded. Raises QuantkitError if activations are not finite.
    """
    head = skeleton.model.get_output_embeddings()
    tokens = distributed.count() * sum(batch.numel() for batch in batches)
    batches = batches[:: head_every(tokens, head.in_features)]
    states = walk.through(skeleton, batches, decoded=True, place=place)
    sums = capture.SiteSums(head.in_features, skeleton.device)
    for hidden in states:
        for inputs in repeated(head, lambda k, hidden=hidden: skeleton.logits(hidden[k]), len(hidden)):
            sums.add(inputs)
    statistics = sums.finish()
    statistics.refuse_not_finite("the output matrix", str(skeleton.dtype)[6:])
    return statistics


def as_imatrix(gathered: Importance, names: Mapping[str, str], calibrated: CalibrationSet) -> Imatrix:
    """Return the sums as an importance matrix, with stacked experts. A chunk is a calibration sequence."""
    from quantkit.models.gguf.imatrix import Imatrix  # `gguf` takes a while to import

    made = calibrated.provenance
    by_name: dict[str, list[tuple[Tensor, int]]] = {}
    for linear, name in names.items():
        if linear in gathered:
            by_name.setdefault(name, []).append(gathered[linear])
    sums, counts = {}, {}
    for name, experts in by_name.items():
        squares, tokens = zip(*experts, strict=True)
        sums[name] = torch.stack(squares).squeeze(0)
        counts[name] = torch.tensor(tokens, dtype=torch.float32)
    return Imatrix(sums, counts, (made.source,), chunk_count=made.samples, chunk_size=made.seqlen)
