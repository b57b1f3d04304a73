"""Blocks of 4-bit floats with one scale: how gpt-oss's experts are published.

Source: OCP Microscaling Formats (MX) 1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 `[..., groups * 32]`, exactly, of `blocks [..., groups, 16]`, the first of two values in the
    low bits, and exponents `scales [..., groups]`, both uint8."""
    positive = torch.tensor(MAGNITUDES, device=blocks.device)
    values = torch.cat((positive, -positive))
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - BIAS
    return torch.ldexp(values[codes.long()], exponents).flatten(-2).to(torch.bfloat16)
