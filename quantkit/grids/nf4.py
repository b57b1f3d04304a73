"""NF4, the 4-bit NormalFloat of QLoRA (Dettmers et al. 2023, arXiv:2305.14314, section 3 and appendix E).

`w = absmax * table[code]`, one absmax for 64 weights of a row. With double quantization the absmax values are
stored in 8 bits, in blocks of 256 across the whole matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quantkit.grids.grid import by_rows, map_rows
from quantkit.grids.levels import Absmax, TableLevels, constant, usable

BLOCK = 64
NESTED_BLOCK = 256
UNITS = 8192  # steps per absmax; TableLevels looks up the nearest level of each step
UPPER = 20  # upper bits of a float32, which nearly always determine its code
DOUBT = 1 << 14  # flag of upper bits that do not
TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class NestedParams:
    """Double-quantized absmax: `absmax = dynamic_map[code] * nested + offset`.

    code: uint8. nested: float32, the largest |absmax - offset| of the block of 256 to which an absmax
    belongs. offset: float32, mean absmax of the matrix. All three have the shape of absmax.
    """

    code: Tensor
    nested: Tensor
    offset: Tensor

    @staticmethod
    def of(code: Tensor, nested: Tensor, offset: Tensor) -> NestedParams:
        """Return the parameters of a matrix from codes `[out, groups]`, the nested absmax of every block, and
        the offset, `[1]` or a scalar."""
        nested = nested.repeat_interleave(NESTED_BLOCK)[: code.numel()].view(code.shape)
        return NestedParams(code, nested, offset.expand(code.shape))

    @property
    def absmax(self) -> Tensor:
        """The decoded absmax."""
        values = dynamic_map(self.code.device).index_select(0, self.code.flatten().int())
        return values.view(self.code.shape) * self.nested + self.offset


@dataclass(frozen=True)
class Nf4Grid(TableLevels):
    """double_quant: store absmax in 8 bits. Weights are rounded with the absmax as it will be decoded."""

    double_quant: bool = True
    group_size = BLOCK
    bits = 4
    level_table = tuple(UNITS * value for value in TABLE)

    @property
    def spans_matrix(self) -> bool:
        return self.double_quant

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Absmax:
        """Return the absmax `[rows]` of `weight [rows, 64]`; importance is ignored."""
        return Absmax(by_rows(lambda rows: rows.abs().amax(1), weight.new_empty(len(weight)), weight))

    def fit_matrix(self, weight: Tensor, importance: Tensor | None = None) -> Absmax | NestedParams:
        params = super().fit_matrix(weight)
        return double_quantize(params.absmax) if self.double_quant else params

    def describe(self) -> str:
        return "nf4, double quantization" if self.double_quant else "nf4"

    def round(self, weight: Tensor, params: Absmax | NestedParams) -> Tensor:
        def work(rows: Tensor, factor: Tensor) -> Tensor:
            return nearest(rows * factor[:, None], TABLE)

        return map_rows(work, torch.uint8, weight, _inverse(params.absmax))

    def steps(self, params: Absmax | NestedParams) -> tuple[Tensor, Tensor]:
        """Return step = absmax / UNITS and low = 0, both `[1, rows]`. If absmax is 0, all codes are 7."""
        absmax = params.absmax
        return usable(absmax.clamp(min=0) / UNITS)[None], torch.zeros_like(absmax)[None]

    def decode(self, codes: Tensor, params: Absmax | NestedParams) -> Tensor:
        def work(rows: Tensor, absmax: Tensor) -> Tensor:
            values = constant(TABLE, rows.device).index_select(0, rows.flatten().int())
            return values.view(rows.shape).mul_(absmax[:, None])

        return map_rows(work, torch.float32, codes, params.absmax)

    def scaled(self, params: Absmax | NestedParams, factor: Tensor) -> Absmax | NestedParams:
        """Return absmax times `factor [rows]`; if double-quantized, the nearest value that its block
        stores."""
        if not self.double_quant:
            return Absmax(params.absmax * factor)
        exact = (params.absmax * factor - params.offset) * _inverse(params.nested)
        return NestedParams(_nearest_dynamic(exact), params.nested, params.offset)

    def floats(self, params: Absmax | NestedParams) -> dict[str, Tensor]:
        """Return absmax `[out, groups]`, or if double-quantized nested absmax `[blocks]` and offset `[1]`."""
        if isinstance(params, Absmax):
            return {"absmax": params.absmax}
        return {"nested": params.nested.flatten()[::NESTED_BLOCK], "offset": params.offset.flatten()[:1]}

    def with_floats(
        self, params: Absmax | NestedParams, floats: Mapping[str, Tensor]
    ) -> Absmax | NestedParams:
        if isinstance(params, Absmax):
            return Absmax(floats["absmax"])
        return NestedParams.of(params.code, floats["nested"], floats["offset"])


def double_quantize(absmax: Tensor) -> NestedParams:
    """Return absmax `[out, groups]` in 8 bits: the mean is subtracted, blocks are 256 in row-major order."""
    offset = absmax.mean()
    centred = (absmax - offset).flatten()
    padded = torch.nn.functional.pad(centred, (0, -len(centred) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    nested = padded.abs().amax(1)
    code = _nearest_dynamic(padded * _inverse(nested)[:, None]).flatten()[: len(centred)]
    return NestedParams.of(code.view(absmax.shape), nested, offset)


@cache
def dynamic_map(device: torch.device | None = None) -> Tensor:
    """Return the 256 values of bitsandbytes' signed dynamic 8-bit type, float32, ascending.

    Dettmers 2015, arXiv:1511.04561, section 2.1: a decimal exponent of 0 to 6 in unary; the remaining bits
    number equal parts of [0.1, 1], and the value is the middle of a part. Two more codes are 0 and 1.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)
        values += middles.tolist() + (-middles).tolist()
    return torch.tensor(sorted(values)).to(device)


def _nearest_dynamic(scaled: Tensor) -> Tensor:
    """Return the codes, uint8, of the nearest values of `dynamic_map`."""
    return nearest(scaled, tuple(dynamic_map().tolist()))


def _inverse(absmax: Tensor) -> Tensor:
    """Return 1 / absmax; 0 for a group of zeros."""
    return torch.where(absmax > 0, 1 / absmax, 0.0)


# ---- rounding to at most 256 ascending float32 values by look-up: 5 times as fast as `bucketize`


def nearest(scaled: Tensor, values: tuple[float, ...]) -> Tensor:
    """Return codes, uint8, of the values nearest to `scaled` of any shape; ties go to the lower value.

    On a CPU, the upper bits of a number nearly always determine its code. Other codes, and all codes on an
    accelerator, come from a binary search.
    """
    midpoints = _midpoints(values, scaled.device)
    if scaled.device.type != "cpu":
        return torch.bucketize(scaled, midpoints, out_int32=True).to(torch.uint8)
    table = _by_upper_bits(values)
    flat = scaled.flatten()
    index = (flat.view(torch.int32) >> (32 - UPPER)).bitwise_and_((1 << UPPER) - 1)
    codes = table.index_select(0, index)
    width, word = (4, torch.int64) if len(codes) % 4 == 0 else (1, torch.int16)
    doubtful = (codes.view(word) & sum(DOUBT << 16 * lane for lane in range(width))).nonzero()[:, 0]
    if len(doubtful):
        searched = torch.bucketize(flat.view(-1, width)[doubtful], midpoints, out_int32=True)
        codes.view(-1, width)[doubtful] = searched.to(torch.int16)
    return codes.to(torch.uint8).view(scaled.shape)


@cache
def _midpoints(values: tuple[float, ...], device: torch.device) -> Tensor:
    ascending = torch.tensor(values)
    return ((ascending[1:] + ascending[:-1]) / 2).to(device)


@cache
def _by_upper_bits(values: tuple[float, ...]) -> Tensor:
    """Return the code of the float32 values that share their upper UPPER bits, int16 `[2 ** UPPER]`. DOUBT is
    added where these values have several codes."""
    midpoints = _midpoints(values, torch.device("cpu"))
    lower = 32 - UPPER
    start = torch.arange(1 << UPPER, dtype=torch.int64) << lower
    ends = torch.stack([start, start + (1 << lower) - 1]).to(torch.uint32).view(torch.float32)
    first, last = torch.bucketize(ends.nan_to_num(0.0), midpoints).to(torch.int16)
    return torch.where(first == last, first, first | DOUBT)
