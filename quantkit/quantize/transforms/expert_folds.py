"""Folds inside an expert, found as if the expert were a block: they affect nothing else in its layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from quantkit.models.skeleton.experts import Experts
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.calibrate.view import BlockView, Transformed
from quantkit.quantize.transforms.fold import Fold, Producer, find_folds
from quantkit.quantize.transforms.probe import probing


@dataclass(frozen=True)
class Expert:
    """An expert and its view. prefix: of its linears' names in the block. sites: site of the block -> site of
    `view`. producers: those of an earlier expert of the layer; empty for the first expert."""

    prefix: str
    view: BlockView
    sites: Mapping[Site, Site]
    producers: list[list[Producer]]

    def find_folds(self) -> list[Fold]:
        """Return the folds inside the expert. Experts of a layer have equal modules, so the folds of the
        first expert are the candidates for all others, and are proven there."""
        with probing(self.view) as probe:
            if self.producers:
                return find_folds(probe, lambda *_: iter(self.producers[0]))
            folds = find_folds(probe)
        self.producers.append([fold.producer for fold in folds])
        return folds

    def merge(self, inner: Transformed, result: Transformed) -> None:
        """Add the changes inside the expert to the changes of the block."""
        result.changed.update(f"{self.prefix}{name}" for name in inner.changed)
        result.row_factors.update({f"{self.prefix}{name}": part for name, part in inner.row_factors.items()})
        for name, facts in inner.facts.items():
            if scaled := facts.get("scaled"):
                facts |= {"scaled": scaled | {"into": f"{self.prefix}{scaled['into']}"}}
            result.report(f"{self.prefix}{name}", **facts)
        result.statistics.update({site: inner.statistics[own] for site, own in self.sites.items()})


def experts(
    view: BlockView,
    entering: Mapping[str, Tensor],
    folded: Collection[Site],
    known: dict[str, list[list[Producer]]],
) -> Iterator[Expert]:
    """Yield the experts of a block that have sites to be quantized and not in `folded`.

    entering: a few tokens for each layer, `[tokens, in]` float32, which run through all its experts. known:
    producers by layer, see `Expert`.
    """
    for name, layer in view.block.named_modules():
        if not isinstance(layer, Experts):
            continue
        tokens = entering[f"{name}.entering"]
        tokens = tokens[tokens.any(-1)]
        for index in range(layer.count):
            prefix = f"{name}.{index}."
            sites = {
                site: Site(tuple(linear.removeprefix(prefix) for linear in site.linears))
                for site in view.statistics
                if site.linears and site.linears[0].startswith(prefix) and site not in folded
            }
            if sites:
                grids = {name: grid for name, grid in view.grids.items() if name.startswith(prefix)}
                inner = replace(
                    view,
                    block=layer.get_submodule(str(index)),
                    sites=list(sites.values()),
                    statistics={own: view.statistics[site] for site, own in sites.items()},
                    grids={name.removeprefix(prefix): grid for name, grid in grids.items()},
                    probe=partial(layer.alone, index, tokens),
                    stored=lambda name, tensor, prefix=prefix: view.stored(f"{prefix}{name}", tensor),
                )
                yield Expert(prefix, inner, sites, known.setdefault(name, []))
