"""How large keys and values become in calibration text, for caches that scale them by a stored number.

Keys are what attention hands to its cache: behind their norm and rotary embedding, as engines quantize them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.grids.float8 import LARGEST
from quantkit.layouts import LinearSpec
from quantkit.models.machine import distributed

PARAMETERS = ("past_key_values", "past_key_value", "layer_past")  # what forwards call a cache
PROJECTIONS = ("k_proj", "v_proj", "qkv_proj", "kv_b_proj")  # by which compressed-tensors knows attention


class Peaks:
    """Keeps nothing but the largest |key| and |value| it was given; None before there are such."""

    def __init__(self):
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def get_seq_length(self, *args: Any) -> int:
        """Nothing comes before a calibration sequence."""
        return 0

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Both as they came."""
        self.keys, self.values = _larger(self.keys, keys), _larger(self.values, values)
        return keys, values


def _larger(peak: Tensor | None, states: Tensor) -> Tensor:
    found = states.detach().abs().amax().float().clamp_(min=torch.finfo(torch.bfloat16).tiny)
    return found if peak is None else torch.maximum(peak, found)


def scales(found: Mapping[str, Peaks], rows: Iterable[LinearSpec]) -> dict[str, Tensor]:
    """`k_scale` and `v_scale`, bfloat16 `[1]`, by stored name: with these the peaks become the largest value
    of e4m3. rows: linears of the block."""
    first = next(iter(rows))
    block = first.name.removesuffix(first.local)
    return {
        f"{block}{place}.{name}": (distributed.largest_(peak) / LARGEST).to(torch.bfloat16).view(1)
        for place, peaks in found.items()
        for name, peak in (("k_scale", peaks.keys), ("v_scale", peaks.values))
        if peak is not None
    }


@contextmanager
def watched(block: nn.Module) -> Iterator[dict[str, Peaks]]:
    """The peaks of each attention inside a block, by its name there, over whatever runs meanwhile."""
    found: dict[str, Peaks] = {}
    with ExitStack() as stack:
        for name, module in block.named_modules():
            parameter = _parameter(module)
            if parameter and any(hasattr(module, projection) for projection in PROJECTIONS):
                found[name] = Peaks()
                stack.enter_context(_handed(module, parameter, found[name]))
        yield found


@contextmanager
def _handed(module: nn.Module, parameter: str, peaks: Peaks) -> Iterator[None]:
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | {parameter: peaks}

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _parameter(module: nn.Module) -> str | None:
    """What a module's forward calls the cache it reads."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in PARAMETERS if name in names), None)
