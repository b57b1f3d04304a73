"""Linears with quantized inputs, computed as compressed-tensors computes them.

Inputs are rounded and scaled back in the precision of the model ("fake quantization"), then multiplied with
the decoded weight. Source: compressed-tensors 0.20 `quantization/utils/helpers.py: calculate_qparams`,
`lifecycle/forward_helpers.py: _quantize_dequantize`. Integer engines sum products of integers instead
(vLLM: with int8 scales of absmax / 127). The results differ in the last places.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from quantkit.grids.float8 import LARGEST_FLOAT8, TOP, nearest
from quantkit.grids.fp4 import LARGEST_FP4, mx_scale
from quantkit.layouts.compressed_tensors.forms import Numbers

FP4_EPS = 0.125  # replaces an e4m3 scale of 0


class QuantizedInputLinear(nn.Module):
    """A linear that quantizes its inputs. weight: float `[out, in]`. scale: `[1]` if inputs have a stored
    scale, else None. exact: inputs are rounded in float32, whatever their precision."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        numbers: Numbers,
        scale: Tensor | None = None,
        exact: bool = False,
    ):
        super().__init__()
        self.numbers, self.exact = numbers, exact
        for name, tensor in {"weight": weight, "bias": bias, "scale": scale}.items():
            self.register_buffer(name, tensor)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        if self.weight.dtype != hidden.dtype:  # once: only an input tells the precision
            self.weight = self.weight.to(hidden.dtype)
        inputs = rounded(hidden.float() if self.exact else hidden, self.numbers, self.scale)
        return linear(inputs.to(hidden.dtype), self.weight, self.bias)


def rounded(hidden: Tensor, numbers: Numbers, scale: Tensor | None = None) -> Tensor:
    """Return `hidden [..., in]` quantized and dequantized, in its own precision."""
    groups = hidden.unflatten(-1, (-1, numbers.group_size or hidden.shape[-1]))
    if numbers.is_fp4:
        return _rounded_fp4(groups, scale).flatten(-2).to(hidden.dtype)
    scale = _scale(groups, numbers) if numbers.dynamic else scale.to(hidden.dtype)
    if numbers.kind == "float":
        return nearest((groups / scale).float()).to(hidden.dtype).mul_(scale).flatten(-2)
    return ((groups / scale).clamp(-128, 127).round() * scale).flatten(-2)


def _scale(hidden: Tensor, numbers: Numbers) -> Tensor:
    """Return the scale of each token or group, computed from its largest value."""
    if numbers.power_of_two:
        return mx_scale(hidden.abs().amax(-1, keepdim=True), TOP)
    scale = hidden.abs().amax(-1, keepdim=True) / (LARGEST_FLOAT8 if numbers.kind == "float" else 127.5)
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def _rounded_fp4(groups: Tensor, divisor: Tensor | None) -> Tensor:
    """Return `[..., groups, group_size]` rounded to 4-bit floats. divisor: `[1]`, NVFP4's; None for MXFP4."""
    largest = groups.abs().amax(-1, keepdim=True)
    if divisor is None:  # scale the largest value to 3.5 to 7 by a power of two, then clip at 6
        step = mx_scale(largest, 2)
    else:
        scale = nearest(largest / LARGEST_FP4 * divisor)
        step = torch.where(scale == 0, FP4_EPS, scale) / divisor
    return to_fp4(groups / step) * step


def to_fp4(x: Tensor) -> Tensor:
    """Return the nearest values of e2m1; ties go to even."""
    size = x.abs()
    coarse = torch.where(size < 4, x.round(), (x / 2).round() * 2)
    return torch.where(size < 2, (x * 2).round() / 2, coarse).clamp(-LARGEST_FP4, LARGEST_FP4)
