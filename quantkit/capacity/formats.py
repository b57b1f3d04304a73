"""Bytes of a model's weights in each format: packed linears, scales and all, and what stays as it is.

What quantkit's methods write with their default options, to the byte; GGUF without metadata and tokenizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from quantkit.capacity import gguf
from quantkit.capacity.parameters import Parameters, Tensor
from quantkit.capacity.settings import Settings
from quantkit.errors import name_all
from quantkit.layouts import _sizes

BITS, GROUP_SIZE = 4, 128  # defaults of gptq and awq
PER_WORD = 8  # 4-bit codes in an int32


class Unfit(Exception):
    """Why a format cannot hold a model."""


@dataclass(frozen=True)
class Weights:
    """A model in one format. bytes: of all its tensors, as stored; None where `reason` says it cannot be.

    packed_bytes: of the blocks' linears alone. bits_per_weight: of all parameters. stream_bits: per weight of
    what a matrix product reads, groups' scales included; a scale per row is not counted.
    """

    bytes: int | None
    packed_bytes: int
    bits_per_weight: float | None
    stream_bits: float
    reason: str = ""


@dataclass(frozen=True)
class Packed:
    """Linears packed one by one, everything else as stored.

    nbytes(out_features, in_features); multiples that in_features and out_features must be of. without:
    families that clients read otherwise.
    """

    nbytes: Callable[[int, int], int]
    stream_bits: float
    in_multiple: int = 1
    out_multiple: int = 1
    conv1d: bool = True
    without: tuple[str, ...] = ()

    def packed_bytes(self, parameters: Parameters, model_type: str) -> int:
        """Bytes of all linears of the blocks. Raises Unfit naming those that cannot be packed."""
        if model_type in self.without:
            raise Unfit(
                f"clients want scales of activations for {model_type}; --layout compressed-tensors does it"
            )
        if parameters.fused_experts or not parameters.linears:
            raise Unfit("experts of a block are one tensor" if parameters.fused_experts else "no linears")
        refused = Counter(why for tensor in parameters.linears if (why := self._unfit(tensor)))
        if refused:
            raise Unfit(name_all((f"{why} ({number} linears)" for why, number in refused.items()), 2))
        # millions of linears of experts are of a few shapes
        shapes = Counter((tensor.out_features, tensor.in_features) for tensor in parameters.linears)
        return sum(count * self.nbytes(*shape) for shape, count in shapes.items())

    def _unfit(self, tensor: Tensor) -> str:
        if tensor.conv1d and not self.conv1d:
            return "clients do not replace a Conv1D"
        if tensor.in_features % self.in_multiple:
            return f"in_features {tensor.in_features} is no multiple of {self.in_multiple}"
        if tensor.out_features % self.out_multiple:
            return f"out_features {tensor.out_features} is no multiple of {self.out_multiple}"
        return ""


GROUP_BITS = BITS + (_sizes.SCALE_BITS + BITS) / GROUP_SIZE
NF4_BITS = 4 + (8 + 32 / _sizes.NF4_NESTED_BLOCK) / _sizes.NF4_BLOCK
PACKED: dict[str, Packed] = {
    "int8": Packed(_sizes.int8, 8.0),
    "nf4": Packed(partial(_sizes.nf4, double_quant=True), NF4_BITS, _sizes.NF4_BLOCK),
    "gptq": Packed(partial(_sizes.gptq, bits=BITS, group_size=GROUP_SIZE), GROUP_BITS, GROUP_SIZE, PER_WORD),
    "awq": Packed(
        partial(_sizes.awq, bits=BITS, group_size=GROUP_SIZE),
        GROUP_BITS,
        GROUP_SIZE,
        PER_WORD,
        conv1d=False,
        without=_sizes.ACTIVATION_SCALES,
    ),
}
NAMES = ("bf16", *PACKED, *gguf.FILE_TYPES)


def weights(name: str, parameters: Parameters, settings: Settings) -> Weights:
    """A model in the format of this name."""
    count = parameters.count
    linears = sum(tensor.size for tensor in parameters.linears)
    if name == "bf16":
        return _weights(2 * count, 2 * linears, count, 16.0)
    try:
        if name in PACKED:
            packed = PACKED[name].packed_bytes(parameters, settings.model_type)
            rest = sum(tensor.nbytes for tensor in parameters.rest)
            return _weights(packed + rest, packed, count, PACKED[name].stream_bits)
        total, packed = gguf.file_bytes(name, parameters, settings)
        return _weights(total, packed, count, 8 * packed / linears)
    except (Unfit, gguf.Unfit) as error:
        return Weights(None, 0, None, stream_bits(name), str(error))


def by_count(name: str, count: int) -> Weights:
    """So many parameters in the format of this name, as if every one of them were packed."""
    bits = stream_bits(name)
    nbytes = round(count * bits / 8)
    return _weights(nbytes, nbytes, count, bits)


def stream_bits(name: str) -> float:
    """Bits per weight of linears in a format; of GGUF file types those of their base type."""
    return 16.0 if name == "bf16" else PACKED[name].stream_bits if name in PACKED else gguf.base_bits(name)


def _weights(nbytes: int, packed: int, count: int, bits: float) -> Weights:
    return Weights(nbytes, packed, 8 * nbytes / count, bits)
