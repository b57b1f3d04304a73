"""An expert as a block of its own: what is folded inside it concerns nothing else of its layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from quantkit.models.skeleton.experts import Experts
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.transforms import BlockView, Transformed
from quantkit.quantize.transforms.fold import Fold, Producer, find_folds
from quantkit.quantize.transforms.probe import probing


@dataclass(frozen=True)
class Expert:
    """prefix: what the names of its linears begin with in the block. sites: in the block -> in `view`.
    known: producers found in an expert of its layer before, empty for the first."""

    prefix: str
    view: BlockView
    sites: Mapping[Site, Site]
    known: list[list[Producer]]

    def find_folds(self) -> list[Fold]:
        """Folds inside the expert. Experts of a layer compute alike: what the first has is tried, and proven,
        in all others."""
        with probing(self.view) as probe:
            if self.known:
                return find_folds(probe, lambda *_: iter(self.known[0]))
            found = find_folds(probe)
        self.known.append([fold.producer for fold in found])
        return found

    def tell(self, inner: Transformed, result: Transformed) -> None:
        """Add what was done inside to what was done to the block."""
        result.changed.update(f"{self.prefix}{name}" for name in inner.changed)
        result.rtn_errors.update({f"{self.prefix}{name}": error for name, error in inner.rtn_errors.items()})
        result.notes.update({f"{self.prefix}{name}": notes for name, notes in inner.notes.items()})
        result.row_factors.update({f"{self.prefix}{name}": part for name, part in inner.row_factors.items()})
        for name, scaled in inner.scaled.items():
            result.scaled[f"{self.prefix}{name}"] = scaled | {"into": f"{self.prefix}{scaled['into']}"}
        result.statistics.update({site: inner.statistics[own] for site, own in self.sites.items()})


def experts(
    view: BlockView,
    entering: Mapping[str, Tensor],
    folded: Collection[Site],
    known: dict[str, list[list[Producer]]],
) -> Iterator[Expert]:
    """Experts of a block with sites that are to be quantized and not `folded` yet.

    entering: a few tokens by place, `[tokens, in]` float32, of which each goes through all experts here.
    known: by layer, see `Expert`.
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
                yield Expert(
                    prefix,
                    _view(view, prefix, layer, index, sites, tokens),
                    sites,
                    known.setdefault(name, []),
                )


def _view(
    view: BlockView, prefix: str, layer: Experts, index: int, sites: Mapping[Site, Site], tokens: Tensor
) -> BlockView:
    grids = {name: grid for name, grid in view.grids.items() if name.startswith(prefix)}
    return replace(
        view,
        block=layer.get_submodule(str(index)),
        sites=list(sites.values()),
        statistics={own: view.statistics[site] for site, own in sites.items()},
        grids={name.removeprefix(prefix): grid for name, grid in grids.items()},
        probe=lambda: layer.alone(index, tokens),
        stored=lambda name, tensor: view.stored(f"{prefix}{name}", tensor),
    )
