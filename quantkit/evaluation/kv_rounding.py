"""What engines read from a quantized key/value cache in place of what was written to it.

All take and return `[batch, heads, tokens, head_dim]` in the precision of the model, as a Hugging Face cache
does, a batch of sequences that do not know of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.ggml import named as ggml_grid
from quantkit.grids.grid import group
from quantkit.models.kv_types import BLOCK, GROUP
from quantkit.quantize.transforms.rotation.orthogonal import sylvester

RESIDUAL = 128  # tokens that transformers gathers in full precision before it quantizes them
ROTATED = 64  # least size of llama.cpp's rotations


@dataclass(frozen=True)
class KvRounding:
    """keys, values: their rounding. residual: how many tokens are gathered before they are rounded, 0 where
    each is rounded as it comes and even its own query reads it so."""

    keys: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]
    residual: int = 0

    def readings(self, tokens: int) -> list[tuple[int, int]]:
        """How a cache that grows a token at a time is read: (q, end), the queries up to `end` read the first
        `q` tokens as they were rounded, the others as they are. The queries of all readings are consecutive.
        """
        if not self.residual:
            return [(tokens, tokens)]
        # The first token is rounded at once; its own query and that of the last token gathered read
        # them before that (transformers, cache_utils.py, QuantizedLayer.update).
        starts = range(1, tokens, self.residual)
        return [(0, 1), *((start, min(start + self.residual, tokens)) for start in starts)]


def named(name: str) -> KvRounding:
    """Of a name of `kv_types.TYPES`."""
    if name in ("float32", "bfloat16", "float16"):
        return _same(partial(_cast, getattr(torch, name)))
    if name == "fp8":
        return _same(_fp8)
    if name == "int4":
        return _same(partial(_each, _quanto4), RESIDUAL)
    if name == "int8":
        return _same(partial(_each, _hqq8), RESIDUAL)
    grid = name.upper()
    return KvRounding(partial(_ggml, grid, False), partial(_ggml, grid, True))


def _same(round_both: Callable[[Tensor], Tensor], residual: int = 0) -> KvRounding:
    return KvRounding(round_both, round_both, residual)


def _cast(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype).to(x.dtype)


def _fp8(x: Tensor) -> Tensor:
    """vLLM's `fp8`: e4m3 by a scale of 1, what is too large becomes the largest."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-most, most).to(torch.float8_e4m3fn).to(x.dtype)


def scaled(keys: Tensor, values: Tensor) -> KvRounding:
    """`fp8` with calibrated scales, one number each, as checkpoints store them (`k_scale`, `v_scale`)."""
    return KvRounding(partial(_fp8_scaled, keys), partial(_fp8_scaled, values))


def _fp8_scaled(scale: Tensor, x: Tensor) -> Tensor:
    scale = scale.to(x)
    return _fp8(x / scale) * scale


def _ggml(name: str, small: bool, x: Tensor) -> Tensor:
    """llama.cpp's: blocks of 32 along a head, which is rotated before by a Hadamard matrix (llama.cpp #21038)
    where it is whole 64s: of 64 for values (small), of the largest power of 2 that fits for keys.

    Queries are rotated, and outputs rotated back: that is rotating back what is read. Raises QuantkitError
    for heads that are no whole blocks, which llama.cpp refuses.
    """
    width = x.shape[-1]
    if width % BLOCK:
        raise QuantkitError(
            f"a head of {width} values is no whole blocks of {BLOCK}",
            f"llama.cpp keeps no {name.lower()} cache of this model: choose int8, int4, fp8 or a float",
            UNSUPPORTED,
        )
    size = ROTATED if small else _largest_power(width)
    turn = sylvester(size, x.device) if width % ROTATED == 0 else None
    turned = x.float() if turn is None else _turn(x.float(), turn)
    grid, rows = ggml_grid(name), turned.reshape(-1, BLOCK)
    codes, params = grid.quantize(rows)
    read = grid.decode(codes, group(params, 0)).view(turned.shape)
    return (read if turn is None else _turn(read, turn)).to(x.dtype)


def _largest_power(width: int) -> int:
    """Of 2 that divides a head's width."""
    return width & -width


def _turn(x: Tensor, turn: Tensor) -> Tensor:
    """Every `len(turn)` values of a head times a symmetric orthogonal matrix: its own inverse."""
    return (x.unflatten(-1, (-1, len(turn))) @ turn).flatten(-2)


def _each(round_groups: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """transformers quantizes one sequence's cache in groups of 64 values as they lie in memory, heads first.

    Raises QuantkitError where those are not whole.
    """
    if x[0].numel() % GROUP:
        raise QuantkitError(
            f"{x.shape[1]} heads of {x.shape[-1]} values are no whole groups of {GROUP}",
            "transformers' quantized cache refuses them: choose fp8, or a type of llama.cpp",
            UNSUPPORTED,
        )
    return torch.stack([round_groups(one.reshape(-1, GROUP)).view(one.shape) for one in x])


def _quanto4(rows: Tensor) -> Tensor:
    """optimum-quanto's qint4 with `MaxOptimizer` of `rows [groups, 64]`: 16 steps from minimum to maximum."""
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    scale, shift = (high - low) / 15, -low
    codes = ((rows + shift) / scale).round().nan_to_num(0.0).clamp(0, 15)  # a scale of 0: all are the minimum
    return codes * scale - shift


def _hqq8(rows: Tensor) -> Tensor:
    """HQQ's 8 bit of `rows [groups, 64]` (`axis=1`): steps from minimum to maximum, zero points moved by
    half-quadratic steps for as long as the mean error over all groups falls (hqq, optimize.py, legacy)."""
    x, most, beta, power = rows.float(), 255, 10.0, 0.7
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    scale = torch.where((high - low).abs() <= 1e-4, 1.0, most / (high - low)).clamp(max=2e4)
    zero, best = -low * scale, float("inf")
    for _ in range(20):
        codes = (x * scale + zero).round().clamp(0, most)
        error = x - (codes - zero) / scale
        size = error.abs()
        shrunk = (size - size.pow(power - 1) / beta).clamp(min=0) * error.sign()
        zero = (codes - (x - shrunk) * scale).mean(1, keepdim=True)
        if not (mean := size.mean().item()) < best:
            break
        best = mean
    codes = (x * scale + zero).round().clamp(0, most).to(rows.dtype)
    return (codes - zero.to(rows.dtype)) * (1 / scale).to(rows.dtype)
