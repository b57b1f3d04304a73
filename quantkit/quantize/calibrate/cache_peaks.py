"""Largest keys and values on calibration text, for KV caches with stored scales.

Keys are recorded as attention passes them to its cache, after norm and rotary embedding, because engines
quantize them there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import UNSUPPORTED, require
from quantkit.grids.float8 import LARGEST_FLOAT8
from quantkit.layouts import LinearSpec
from quantkit.models.machine import distributed
from quantkit.models.skeleton.caches import ModuleCache, parameter_of, with_cache

PROJECTIONS = ("k_proj", "v_proj", "qkv_proj", "kv_b_proj")  # by which compressed-tensors knows attention


class Peaks(ModuleCache):
    """A cache that records only the largest |key| and |value|; None before the first call."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def forget(self) -> None:
        """Record nothing."""
        self.keys = self.values = None

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Record the largest key and value; return keys and values unchanged."""
        self.keys, self.values = _larger(self.keys, keys), _larger(self.values, values)
        return keys, values


def _larger(peak: Tensor | None, states: Tensor) -> Tensor:
    largest = states.detach().abs().amax().float().clamp_(min=torch.finfo(torch.bfloat16).tiny)
    return largest if peak is None else torch.maximum(peak, largest)


def scales(
    attentions: Mapping[str, Peaks], specs: Iterable[LinearSpec], names: Sequence[str]
) -> dict[str, Tensor]:
    """Return the scales of keys and values, bfloat16 `[1]`, by stored name: the peaks divided by e4m3's
    largest value. specs: of the block's linears. names: of the two scales in an attention."""
    first = next(iter(specs))
    block = first.name.removesuffix(first.local)
    return {
        f"{block}{attention}.{name}": (distributed.largest_(peak) / LARGEST_FLOAT8).to(torch.bfloat16).view(1)
        for attention, peaks in attentions.items()
        for name, peak in zip(names, (peaks.keys, peaks.values), strict=True)
        if peak is not None
    }


@contextmanager
def watched(block: nn.Module) -> Iterator[dict[str, Peaks]]:
    """Yield the Peaks of each attention in a block, by name; forward passes in this context update them."""
    attentions: dict[str, Peaks] = {}
    with ExitStack() as stack:
        for name, module in _takers(block):
            peaks = Peaks()  # an indexer in an attention has its own
            before = vars(module).get("forward")
            restore = (setattr, module, "forward", before) if before else (delattr, module, "forward")
            module.forward = with_cache(module.forward, peaks)
            stack.callback(*restore)
            if _is_known(module):
                attentions[name] = peaks
        yield attentions


def check(blocks: Iterable[nn.Module]) -> None:
    """Raise QuantkitError if no attention takes a cache that is known: no scale would be stored."""
    what = "no attention of this model takes its keys and values in a way that quantkit knows"
    known = any(_is_known(module) for block in blocks for _, module in _takers(block))
    require(known, what, "leave out --kv-cache", UNSUPPORTED)


def _takers(block: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that take a cache, by name."""
    return [(name, module) for name, module in block.named_modules() if parameter_of(module.forward)]


def _is_known(module: nn.Module) -> bool:
    return any(hasattr(module, projection) for projection in PROJECTIONS)
