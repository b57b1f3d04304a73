"""Counts of a configuration that are believed: each makes modules or names before a tensor is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.errors import UNSUPPORTED, QuantkitError, name_all
from quantkit.models.held import EXPERTS, ROUTED

LAYERS = {
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_encoder_layers",
    "decoder_layers", "encoder_layers", "depth",
}  # fmt: skip
FEW = 512  # layers that are built, whatever the headers say: of a second each
COUNTED = dict.fromkeys(("num_labels", *EXPERTS), 1 << 16)
SIZES = 1 << 40  # of anything else
PARTS = 8  # configurations inside one another


def refuse(config: Mapping[str, Any], tensors: int = 0) -> None:
    """Raise QuantkitError naming what cannot be. tensors: how many are stored; each layer has some."""
    layers = max(tensors, FEW)
    odd = [f"{name} {value:,}" for name, value in _numbers(config) if value > _most(name, layers)]
    odd += [f"{name} {value:,}" for name, value in _numbers(config) if name in LAYERS and value < 0]
    odd += _routed(config)
    if odd:
        held = f", and {tensors:,} tensors are stored" if tensors else ""
        raise QuantkitError(f"config.json says {name_all(odd, 3)}{held}", "download it again", UNSUPPORTED)


def _routed(config: Mapping[str, Any]) -> Iterator[str]:
    """More experts for each token than a layer has, of a configuration or one inside it."""
    for part in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        numbers = {name: part[name] for name in (*EXPERTS, *ROUTED) if type(part.get(name)) is int}
        most = max((numbers[name] for name in EXPERTS if name in numbers), default=0)
        routed = ((name, numbers[name]) for name in ROUTED if name in numbers)
        yield from (f"{name} {value:,} of {most:,} experts" for name, value in routed if value > most > 0)


def _most(name: str, layers: int) -> int:
    return layers if name in LAYERS else COUNTED.get(name, SIZES)


def _numbers(config: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, int]]:
    """Whole numbers of a configuration and of those inside it, by name."""
    for name, value in config.items():
        if isinstance(value, Mapping) and depth < PARTS:
            yield from _numbers(value, depth + 1)
        elif isinstance(value, int) and name != "seed":
            yield str(name), value
