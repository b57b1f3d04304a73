"""The linear of LLM.int8 as it runs: inputs are rounded to int8, too, but for columns with outliers."""

from __future__ import annotations

from torch import Tensor, nn

from quantkit.grids.int8 import int8_matmul


class Int8Linear(nn.Module):
    """`int8_matmul` as a module."""

    def __init__(self, codes: Tensor, absmax: Tensor, bias: Tensor | None, threshold: float):
        super().__init__()
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("absmax", absmax, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.threshold = threshold

    def forward(self, inputs: Tensor) -> Tensor:
        """`inputs [..., tokens, in]` to `[..., tokens, out]`."""
        if not inputs.numel():  # no token was routed to this expert
            return inputs.new_empty(*inputs.shape[:-1], len(self.codes))
        sequences = inputs.reshape(-1, *inputs.shape[-2:])
        outputs = int8_matmul(sequences, self.codes, self.absmax, self.threshold, self.bias)
        return outputs.view(*inputs.shape[:-1], len(self.codes))
