"""LLM.int8: row-wise int8 weights and activations, with outlier columns computed separately.

Dettmers et al. 2022, arXiv:2208.07339, section 3: `X W ≈ Σ_{h∈O} X_h W_h + s_X s_W Σ_{h∉O} X̂_h Ŵ_h`, where O
are the columns of X with a value that reaches the threshold. Activations are rounded at run time, so the
error of a weight depends on its inputs. `Int8Linear` is that computation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.grids.grid import by_rows, map_rows
from quantkit.grids.levels import HALF_MAX, HALF_MIN, Absmax, WholeLevels, usable

LEVELS = 127
EXACT = 2**24 // LEVELS**2  # products of this many int8 pairs add up exactly in float32
INVERSE = 0.007874015718698502  # 1 / 127 as bitsandbytes multiplies by it
INVERSE_SQUARE = 6.200124e-05  # its 1 / 127², which is 6.20001e-05


@dataclass(frozen=True)
class Int8Grid(WholeLevels):
    """`w = absmax / 127 * q`, q in -127 .. 127, one absmax per row. Codes are stored unsigned, q + 128.

    As in bitsandbytes, weights are rounded to float16 and then to `round(w * (127 / absmax))`; error feedback
    rounds once, to multiples of `absmax / 127`. group_size: length of a row.
    """

    group_size: int
    bits = 8
    first_code = 1  # -127
    floating = ("absmax",)
    label = "int8 rows"

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Absmax:
        """Return the absmax `[rows]` of `weight [rows, in]`; importance is ignored."""
        absmax = by_rows(lambda rows: rows.abs().amax(1), weight.new_empty(len(weight)), weight)
        return Absmax(absmax.clamp_(max=HALF_MAX).half().float())

    def round(self, weight: Tensor, params: Absmax) -> Tensor:
        def work(rows: Tensor, absmax: Tensor) -> Tensor:
            return _codes(rows.half().float(), absmax).to(torch.int8).view(torch.uint8) ^ 128

        return map_rows(work, torch.uint8, weight, params.absmax)

    def steps(self, params: Absmax) -> tuple[Tensor, Tensor]:
        step = usable(params.absmax * INVERSE)[None]
        return step, step * 128

    def decode(self, codes: Tensor, params: Absmax) -> Tensor:
        def work(rows: Tensor, absmax: Tensor) -> Tensor:
            return (rows ^ 128).view(torch.int8).float().mul_(absmax[:, None]).mul_(INVERSE)

        return map_rows(work, torch.float32, codes, params.absmax)

    def scaled(self, params: Absmax, factor: Tensor) -> Absmax:
        return Absmax(params.absmax * factor)

    def clipped(self, params: Absmax) -> int:
        """Return the number of rows that float16, to which clients round, cannot hold in 8 bits."""
        small = (params.absmax > 0) & (params.absmax < 127 * HALF_MIN)
        return int(((params.absmax >= HALF_MAX) | small).sum())

    def _storable(self, absmax: Tensor) -> Tensor:
        """Return absmax within float16's range, because clients decode to float16; float32 is stored."""
        return absmax.clamp(0, HALF_MAX)


def _codes(rows: Tensor, absmax: Tensor) -> Tensor:
    """Return `round(127 x / absmax)`, float32 in -127 .. 127; 0 in rows of zeros."""
    factor = torch.where(absmax > 0, LEVELS / absmax, 0.0)
    return (rows * factor[:, None]).round_().clamp_(-LEVELS, LEVELS)


class Int8Linear(nn.Module):
    """A linear with a stored weight: codes int8 `[out, in]`, absmax float32 `[out]`. products: the processor
    multiplies int8 fast and exactly; the result is the same."""

    def __init__(
        self, codes: Tensor, absmax: Tensor, bias: Tensor | None, threshold: float, products: bool = False
    ):
        super().__init__()
        for name, tensor in {"codes": codes, "absmax": absmax, "bias": bias}.items():
            self.register_buffer(name, tensor, persistent=False)
        self.threshold, self.products = threshold, products

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `inputs [..., tokens, in]` to `[..., tokens, out]`, in the dtype of `inputs`.

        Outliers are determined for each sequence, so that results do not depend on other sequences in the
        batch. Outlier columns are multiplied by the dequantized weight, as clients do, because the original
        weight is not stored.
        """
        if not inputs.numel():  # no token was routed to this expert
            return inputs.new_empty(*inputs.shape[:-1], len(self.codes))
        sequences = inputs.reshape(-1, *inputs.shape[-2:])
        outliers = outlier_columns(sequences.half(), self.threshold)
        result = self._quantized_part(sequences, outliers)
        result = (result if self.bias is None else result + self.bias).to(inputs.dtype)
        for k in outliers.any(1).nonzero()[:, 0].tolist():
            columns = outliers[k].nonzero()[:, 0]
            weight = (self.codes[:, columns] * self.absmax[:, None] * INVERSE).to(inputs.dtype)
            result[k].addmm_(sequences[k][:, columns], weight.t())
        return result.view(*inputs.shape[:-1], len(self.codes))

    def _quantized_part(self, inputs: Tensor, outliers: Tensor) -> Tensor:
        """Multiply int8 inputs and codes with sums in int32; dequantize with both scales.

        A scale covers an input row's values below the threshold, also in outlier columns, as in bitsandbytes.
        """
        rows = inputs.half().float().flatten(0, 1)
        if self.threshold > 0:
            rows.masked_fill_(rows.abs() >= self.threshold, 0)
        scale = rows.abs().amax(1)
        quantized = _codes(rows, scale).unflatten(0, inputs.shape[:2]).masked_fill_(outliers[:, None], 0)
        sums = _int_matmul(quantized.flatten(0, 1).to(torch.int8), self.codes, self.products)
        return (sums * (scale[:, None] * self.absmax) * INVERSE_SQUARE).unflatten(0, inputs.shape[:2])


def outlier_columns(inputs: Tensor, threshold: float) -> Tensor:
    """Return which columns of `inputs [sequences, tokens, in]` have a value of at least `threshold` (0:
    none), bool `[sequences, in]`."""
    peaks = inputs.abs().amax(1)
    return peaks >= threshold if threshold > 0 else torch.zeros_like(peaks, dtype=torch.bool)


def _int_matmul(a: Tensor, b: Tensor, products: bool = False) -> Tensor:
    """Return `a [n, k] @ b [m, k].T` for int8 factors, in int32.

    CUDA needs n > 16 and multiples of 8, so factors are padded with zeros. On a CPU without integer dot
    products torch uses scalar code, a hundred times slower than float32 products, which are exact in pieces.
    """
    if a.device.type == "cpu":
        # oneDNN takes the length of a row from strides, which say nothing where a row or column is the only
        # one. It then refuses, and torch returns memory that nobody wrote: 2.13 does, pytorch/pytorch#195066.
        if products and a.shape[1] > 1:
            a, b = (factor.reshape(-1).view(factor.shape) for factor in (a, b))
            return torch._int_mm(a, b.t())
        return _pieces_matmul(a, b)
    n, m = len(a), len(b)
    deep = -a.shape[1] % 8
    a = torch.nn.functional.pad(a, (0, deep, 0, max(0, 24 - n)))
    b = torch.nn.functional.pad(b, (0, deep, 0, -m % 8))
    return torch._int_mm(a, b.t())[:n, :m]


def _pieces_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b.T` in int32, by float32 products of EXACT columns at a time."""
    sums = torch.zeros(len(b), len(a), dtype=torch.int32, device=a.device)
    for left, right in zip(a.split(EXACT, 1), b.split(EXACT, 1), strict=True):
        left = left.float().t()
        part = torch.empty(len(b), len(a), device=a.device)
        sums += by_rows(lambda rows, left=left: rows.float() @ left, part, right).to(torch.int32)
    return sums.t()
