"""Folds inside an expert, found as if the expert were a block: they affect nothing else in its layer."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from quantkit.models.skeleton.experts import Experts
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.calibrate.view import BlockView
from quantkit.quantize.transforms.fold import Fold, Producer, find_folds
from quantkit.quantize.transforms.probe import probing


def views(view: BlockView, entering: Mapping[str, Tensor], folded: Collection[Site]) -> Iterator[BlockView]:
    """Yield a view of each expert with sites to be quantized and not in `folded`. entering: a few tokens for
    each layer, `[tokens, in]` float32, which run through all its experts."""
    for name, layer in view.block.named_modules():
        if not isinstance(layer, Experts):
            continue
        tokens = entering[f"{name}.entering"]
        tokens = tokens[tokens.any(-1)]
        for index in range(layer.count):
            expert = f"{name}.{index}"
            inside = (site for site in view.statistics if site.linears and site not in folded)
            sites = [site for site in inside if site.linears[0].startswith(f"{expert}.")]
            if sites:
                statistics = {site: view.statistics[site] for site in sites}
                probe = partial(layer.alone, index, tokens)
                yield replace(view, sites=sites, statistics=statistics, probe=probe, expert=expert)


def find(view: BlockView, known: dict[str, list[Producer]]) -> list[Fold]:
    """Return the folds inside the expert of a view. Experts of a layer have equal modules, so the producers
    of the first expert are the candidates for all others, and are proven there. known: these producers by
    layer, with names inside the expert."""
    layer, prefix = view.expert.rpartition(".")[0], f"{view.expert}."
    with probing(view) as probe:
        if layer in known:
            guesses = [replace(each, name=prefix + each.name) for each in known[layer]]
            return find_folds(probe, lambda *_: iter(guesses))
        folds = find_folds(probe)
    producers = (fold.producer for fold in folds)
    known[layer] = [replace(each, name=each.name.removeprefix(prefix)) for each in producers]
    return folds
