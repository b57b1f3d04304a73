"""Linears whose inputs are quantized, too, computed as compressed-tensors computes them.

Inputs are rounded and scaled back in the precision of the model ("fake quantization"), then multiplied with
the decoded weight. Source: compressed-tensors 0.20 `quantization/utils/helpers.py: calculate_qparams`,
`lifecycle/forward_helpers.py: _quantize_dequantize`. Integer engines sum products of integers instead
(vLLM: with int8 scales of absmax / 127), which differs in the last places.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from quantkit.grids.float8 import FLOAT8, nearest
from quantkit.layouts.compressed_tensors.schemes import Numbers


class QuantizedInputLinear(nn.Module):
    """weight: float `[out, in]`. scale, zero: one number each, where the configuration is static. exact:
    inputs are rounded in float32, whatever their precision."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        numbers: Numbers,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        exact: bool = False,
    ):
        super().__init__()
        self.numbers, self.exact = numbers, exact
        for name, tensor in {"weight": weight, "bias": bias, "scale": scale, "zero": zero}.items():
            self.register_buffer(name, tensor)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        if self.weight.dtype != hidden.dtype:  # once: the precision is known from the first input only
            self.weight = self.weight.to(hidden.dtype)
        inputs = rounded(hidden.float() if self.exact else hidden, self.numbers, self.scale, self.zero)
        return linear(inputs.to(hidden.dtype), self.weight, self.bias)


def rounded(
    hidden: Tensor, numbers: Numbers, scale: Tensor | None = None, zero: Tensor | None = None
) -> Tensor:
    """`hidden [..., in]` as it is after quantizing and scaling back, in its own precision."""
    if numbers.strategy == "group":
        groups = hidden.unflatten(-1, (-1, numbers.group_size))
        return _rounded(groups, numbers, *_parameters(groups, numbers)).flatten(-2)
    if numbers.dynamic:
        return _rounded(hidden, numbers, *_parameters(hidden, numbers))
    zero = torch.zeros_like(scale) if zero is None else zero
    return _rounded(hidden, numbers, scale.to(hidden.dtype), zero.to(hidden.dtype))


def _ends(numbers: Numbers) -> tuple[float, float]:
    if numbers.kind == "float":
        return torch.finfo(FLOAT8).min, torch.finfo(FLOAT8).max
    return -(2.0 ** (numbers.bits - 1)), 2.0 ** (numbers.bits - 1) - 1


def _parameters(hidden: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each token or group, or of the whole tensor, from the values."""
    dims = None if numbers.strategy == "tensor" else -1
    low = hidden.amin(dims, keepdim=True).clamp(max=0)
    high = hidden.amax(dims, keepdim=True).clamp(min=0)
    least, most = _ends(numbers)
    if numbers.symmetric:
        scale = torch.maximum(-low, high) / ((most - least) / 2)
    else:
        scale = (high - low) / (most - least)
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    if numbers.symmetric:
        return scale, torch.zeros_like(scale)
    return scale, (least - low / scale).clamp(least, most).round()


def _rounded(hidden: Tensor, numbers: Numbers, scale: Tensor, zero: Tensor) -> Tensor:
    if numbers.kind == "float" and numbers.symmetric:
        return nearest((hidden / scale).float()).to(hidden.dtype).mul_(scale)
    codes = (hidden / scale + zero).clamp(*_ends(numbers))
    codes = codes.to(FLOAT8).to(hidden.dtype) if numbers.kind == "float" else codes.round()
    return (codes - zero) * scale
