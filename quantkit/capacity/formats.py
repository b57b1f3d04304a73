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
from quantkit.errors import count, name_all
from quantkit.layouts import _sizes

BITS, GROUP_SIZE = 4, 128  # defaults of gptq and awq
SMALLER_GROUPS = (64, 32, 16)
PER_WORD = 8  # 4-bit codes in an int32


class Unfit(Exception):
    """Why a format cannot hold a model."""


@dataclass(frozen=True)
class Weights:
    """A model in one format. bytes: of all its tensors, as stored; None where `reason` says it cannot be.

    packed_bytes: of the blocks' linears alone. read_bytes: what a token reads of all: no tables of which it
    looks up a row, and of experts those it is routed to; None where it is not known which part that is.
    bits_per_weight: of all parameters. stream_bits: per weight of the blocks' linears, groups' scales
    included; a scale per row is not counted.
    """

    bytes: int | None
    packed_bytes: int
    read_bytes: int | None
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

    def tensor_bytes(self, tensor: Tensor) -> int:
        """Bytes of a linear packed, of anything else as it is."""
        return self.nbytes(tensor.out_features, tensor.in_features) if tensor.is_linear else tensor.nbytes

    def check(self, parameters: Parameters, model_type: str) -> None:
        """Raise Unfit naming the linears of the blocks that cannot be packed."""
        if model_type in self.without:
            raise Unfit(
                f"clients want scales of activations for {model_type}; --layout compressed-tensors does it"
            )
        if parameters.fused_experts or not parameters.linears:
            raise Unfit("experts of a block are one tensor" if parameters.fused_experts else "no linears")
        refused: Counter[str] = Counter()
        for group in parameters.groups:
            if group.tensor.is_linear and (why := self._unfit(group.tensor)):
                refused[why] += group.count
        if refused:
            found = (f"{why} ({count(number, 'linear')})" for why, number in refused.items())
            raise Unfit(name_all(found, 2))

    def _unfit(self, tensor: Tensor) -> str:
        if tensor.conv1d and not self.conv1d:
            return "clients do not replace a Conv1D"
        if tensor.in_features % self.in_multiple:
            smaller = next((size for size in SMALLER_GROUPS if tensor.in_features % size == 0), None)
            fix = f"; --group-size {smaller} fits" if smaller and self.in_multiple == GROUP_SIZE else ""
            return f"in_features {tensor.in_features} is no multiple of {self.in_multiple}{fix}"
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
STORED = "stored"  # the files as they are, of a model whose headers were read


def weights(name: str, parameters: Parameters, settings: Settings) -> Weights:
    """A model in the format of this name."""
    if name == "bf16":
        copy = parameters.head_copy
        return _by_tensor(parameters, settings, lambda tensor: 2 * tensor.size * (tensor is not copy), 16.0)
    if name == STORED:
        return _by_tensor(parameters, settings, lambda tensor: tensor.in_file)
    try:
        if name in PACKED:
            method = PACKED[name]
            method.check(parameters, settings.model_type)
            return _by_tensor(parameters, settings, method.tensor_bytes, method.stream_bits)
        found = gguf.file_bytes(name, parameters, settings)
        linears = sum(tensor.size for tensor in parameters.linears)
        bits = 8 * found.total / parameters.count
        return Weights(found.total, found.packed, found.read, bits, 8 * found.packed / linears)
    except (Unfit, gguf.Unfit) as error:
        return Weights(None, 0, None, None, 0.0, str(error))


def by_count(name: str, count: int, active: int | None = None) -> Weights:
    """So many parameters in the format of this name, as if every one of them were packed.

    active: those that a token reads, None where it is not known. GGUF file types, which are mixtures, at the
    bits of a Llama's file.
    """
    if name == "bf16":
        bits = stream_bits = 16.0
    elif name in PACKED:
        bits = stream_bits = PACKED[name].stream_bits
    else:
        bits, stream_bits = gguf.typical_bits(name, count)
    nbytes = round(count * bits / 8)
    read = None if active is None else round(active * bits / 8)
    return Weights(nbytes, nbytes, read, bits, stream_bits)


def _by_tensor(
    parameters: Parameters,
    settings: Settings,
    nbytes: Callable[[Tensor], int],
    stream_bits: float | None = None,
) -> Weights:
    """A format that is known tensor by tensor. stream_bits: those of the linears where nothing is said."""
    total = parameters.total(nbytes)
    packed = parameters.total(lambda tensor: nbytes(tensor) if tensor.is_linear else 0)
    if stream_bits is None:
        weights = parameters.total(lambda tensor: tensor.size if tensor.is_linear else 0)
        stream_bits = 8 * packed / weights if weights else 0.0
    read = parameters.read(settings, nbytes)
    return Weights(total, packed, read, 8 * total / parameters.count, stream_bits)
