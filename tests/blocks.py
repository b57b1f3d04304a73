"""Decoder blocks of a tiny model: one with real inputs, as the loop loads it, or one after another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from quantkit.grids.grid import Grid
from quantkit.layouts import Statistic
from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import walk
from quantkit.quantize.calibrate.capture import SiteSums, gather
from quantkit.quantize.calibrate.sites import Site, find_sites
from quantkit.quantize.calibrate.statistics import SiteStatistics
from quantkit.quantize.calibrate.view import BlockView


@dataclass
class Bench:
    """inputs: hidden states `[sequences, tokens, hidden]` that enter the block."""

    skeleton: Skeleton
    index: int
    block: nn.Module
    inputs: Tensor
    sites: list[Site]

    def run(self) -> Tensor:
        return self.skeleton.run_block(self.index, self.inputs)

    def view(
        self,
        make_grid: Callable[[str], Grid | None] = lambda name: None,
        statistics: Mapping[Site, SiteStatistics] | None = None,
    ) -> BlockView:
        return BlockView(
            block=self.block,
            sites=[site for site in self.sites if site.linears],
            statistics=statistics or {},
            grids={name: make_grid(name) for site in self.sites for name in site.linears},
            probe=self.run,
            stored=lambda name, tensor: tensor.to(self.skeleton.stored_dtype(self.index, name)),
            read=self.block.get_submodule,
        )

    def statistics(self) -> dict[Site, SiteStatistics]:
        """What AWQ wants to know, of every site."""
        needs, cpu = (Statistic.HESSIAN, Statistic.MAGNITUDE), torch.device("cpu")
        sums = {site: SiteSums(site.in_features, cpu, needs) for site in self.sites}
        gather(self.block, sums, self.run)
        return {site: part.finish() for site, part in sums.items()}


def load(folder: Path, dtype: torch.dtype = torch.float32, index: int = 1, shape=(1, 8)) -> Bench:
    """Block `index` of the model in `folder`, behind the blocks before it."""
    skeleton = Skeleton(open_checkpoint(str(folder)), dtype, torch.device("cpu"))
    skeleton.streams = False  # a transform looks at all experts of a block together
    skeleton.load_rest()
    ids = torch.randint(500, shape, generator=torch.Generator().manual_seed(0))
    hidden = skeleton.embed(ids)
    for k in range(index):
        skeleton.load_block(k)
        hidden = skeleton.run_block(k, hidden)
        skeleton.free_block(k)
    block = skeleton.load_block(index)
    sites = find_sites(block, lambda: skeleton.run_block(index, hidden))
    return Bench(skeleton, index, block, hidden, sites)


@torch.no_grad()
def logits(source: Path, ids: Tensor) -> Tensor:
    """Logits `[tokens, vocabulary]` of one sequence, with one block in memory at a time."""
    skeleton = open_skeleton(source)
    (hidden,) = walk.through(skeleton, [ids])
    return skeleton.logits(hidden[0])


def open_skeleton(folder: Path) -> Skeleton:
    """A whole checkpoint in float32; its blocks are not loaded yet."""
    skeleton = Skeleton(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"))
    skeleton.names.check_complete()
    skeleton.load_rest()
    return skeleton


def streamed(skeleton: Skeleton, ids: Tensor) -> Tensor:
    """Logits `[batch, tokens, vocabulary]`, with one block in memory at a time."""
    hidden = skeleton.embed(ids)
    for index, block in enumerate(skeleton.blocks):
        assert {parameter.device.type for parameter in block.parameters()} == {"meta"}
        skeleton.load_block(index)
        hidden = skeleton.run_block(index, hidden)
        skeleton.free_block(index)
    assert all(p.device.type == "meta" for block in skeleton.blocks for p in block.parameters())
    return torch.stack([skeleton.logits(row) for row in hidden])
