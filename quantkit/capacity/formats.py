"""Bytes of a model's weights in each format.

They equal, to the byte, what quantkit's methods write with default options. GGUF files are counted without
metadata and tokenizer; llama-quantize's rules choose the type of each tensor.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from quantkit.capacity import Unsupported, gguf_tensors
from quantkit.capacity.parameters import MOST_EXPERTS, Parameters, Tensor
from quantkit.errors import count, name_all, one_of
from quantkit.layouts import Layout, spec_of_shape
from quantkit.models.files.head import EMBEDDING, HEAD
from quantkit.models.gguf import mixtures
from quantkit.models.gguf.file_types import FILE_TYPES as ALL_FILE_TYPES
from quantkit.models.gguf.file_types import Model
from quantkit.quantize import methods
from quantkit.quantize.methods import Method

ALIGNMENT = 32
OUTSIDE = {"head": HEAD, "embedding": EMBEDDING}
FILE_TYPES = tuple(name for name in ALL_FILE_TYPES if name not in ("F32", "F16", "BF16"))
FEWEST_OF_LARGE = 20_000_000_000  # parameters; models with more count as large
SMALLER_GROUPS = (64, 32, 16)
BITS16 = "16 bit"
STORED = "stored"  # the format of the given files
ALIASES = {
    "as stored": STORED, "fp16": "bf16", "bfloat16": "bf16", "float16": "bf16", "gguf": "q4_k_m",
}  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """Sizes of a model in one format. bytes: of all tensors. packed_bytes: of the blocks' linears.

    read_bytes: bytes that decoding one token reads, without embedding tables and experts not chosen; None if
    the number of chosen experts is unknown. bits_per_weight: mean over all parameters. stream_bits: bits per
    weight of the blocks' linears, with scales of groups but not of whole rows.
    """

    bytes: int
    packed_bytes: int
    read_bytes: int | None
    bits_per_weight: float
    stream_bits: float


@dataclass(frozen=True)
class Packed:
    """The format that a method writes with these options; other tensors stay as stored. computes: type in
    which engines multiply (of FEWER in devices.py, or 16 bit). open_groups: the group size was chosen for the
    model, as by a job without --group-size."""

    method: Method
    computes: str
    open_groups: bool = False

    @cached_property
    def layout(self) -> Layout:
        return self.method.layout

    def fitted(self, parameters: Parameters | None = None) -> Packed:
        """Return the format with the group size that a job without --group-size chooses for a model."""
        if self.method.options.group_size is not None:
            return self
        linears = parameters.linears if parameters else ()
        method = self.method.with_groups((tensor.in_features, tensor.size) for tensor in linears)
        return replace(self, method=method, open_groups=True)

    def packs(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a linear that is packed. A group size that was chosen for the model must
        divide its columns."""
        divided = not self.open_groups or tensor.in_features % self.method.options.group_size == 0
        return tensor.is_linear and divided

    def nbytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of one packed linear."""
        return self.layout.nbytes(spec_of_shape(out_features, in_features, self.method.width(in_features)))

    def tensor_bytes(self, tensor: Tensor) -> int:
        """Return a tensor's bytes in this format: linears of blocks are packed, and head and embedding if the
        options say so; others stay as stored."""
        for name, pattern in OUTSIDE.items():
            bits = getattr(self.method.options, name)
            if bits and tensor.block is None and pattern.fullmatch(tensor.name):
                width = replace(self.method.width(tensor.shape[1]), bits=bits)
                return self.layout.nbytes(spec_of_shape(*tensor.shape, width))
        return self.nbytes(tensor.out_features, tensor.in_features) if self.packs(tensor) else tensor.nbytes

    @cached_property
    def stream_bits(self) -> float:
        """Return the bits per weight of linears, with scales of groups but not of whole rows or columns."""
        low, high = 1 << 20, 1 << 21
        corners = self.nbytes(high, high) - self.nbytes(high, low) - self.nbytes(low, high)
        return 8 * (corners + self.nbytes(low, low)) / low**2

    def check(self, parameters: Parameters) -> None:
        """Raise Unsupported, with the reasons, if a linear of the blocks cannot be packed."""
        if reason := self.layout.check_model(parameters.settings.model_type):
            raise Unsupported(reason)
        if self.method.options.head and parameters.is_tied:
            raise Unsupported("head and embedding are one tensor")
        if not parameters.linears:
            raise Unsupported("no linears")
        refused: Counter[str] = Counter()
        for tensor, _, number in parameters.groups:
            if self.packs(tensor) and (why := self._unfit(tensor)):
                refused[why] += number
        if not any(map(self.packs, parameters.linears)):
            raise Unsupported(f"no linear splits into groups of {self.method.options.group_size}")
        if refused:
            reasons = (f"{why} ({count(number, 'linear')})" for why, number in refused.most_common())
            raise Unsupported(name_all(reasons, 2))

    def _unfit(self, tensor: Tensor) -> str | None:
        columns, width = tensor.in_features, self.method.width(tensor.in_features)
        if columns % width.group_size:
            smaller = next((size for size in SMALLER_GROUPS if columns % size == 0), None)
            grouped = smaller and self.method.options.group_size
            fix = f"; --group-size {smaller} fits" if grouped else ""
            return f"{columns} columns do not split into groups of {width.group_size}{fix}"
        spec = spec_of_shape(tensor.out_features, columns, width)
        return self.layout.check(replace(spec, conv1d=tensor.conv1d))


@cache
def _packed() -> dict[str, Packed]:
    formats = {}
    for name in methods.available():
        method = methods.create(name)
        if method.stored_as == name:
            formats[name] = Packed(method, method.computes)
            for variant, (options, computes) in method.variants.items():
                formats[variant] = Packed(methods.create(name, **options), computes)
    return formats


def names() -> tuple[str, ...]:
    """Return the names of all formats."""
    return ("bf16", *_packed(), *FILE_TYPES)


def named(text: str) -> str:
    """Return the format whose name the user typed. For an unknown name, QuantkitError lists similar ones."""
    spelled = {name.lower(): name for name in (STORED, *names())}
    return spelled[one_of(text.lower(), spelled, f"unknown --format {text!r}", ALIASES)]


def computes(name: str) -> str:
    """Return the type in which engines multiply weights of this format on devices that support the type."""
    method = _packed().get(name)
    return method.computes if method else BITS16


def weights(name: str, parameters: Parameters) -> Weights:
    """Return the sizes of a model in the format with this name. Raises Unsupported, with the reason, if the
    format cannot store the model."""
    if name == "bf16":
        return _by_tensor(parameters, lambda tensor: 2 * tensor.size, 16.0)
    if name == STORED:
        return _by_tensor(parameters, lambda tensor: tensor.in_file)
    if packed := _packed().get(name):
        packed = packed.fitted(parameters)
        packed.check(parameters)
        return _by_tensor(parameters, packed.tensor_bytes, packed.stream_bits, packed.packs)
    return _of_file(name, parameters)


def by_count(name: str, count: int, active: int) -> Weights:
    """Return the sizes of `count` parameters in the format with this name, as if all were packed. active:
    number of parameters used per token. GGUF file types take the bits of a Llama's file."""
    if name == "bf16":
        bits = 16.0
    elif name in _packed():
        bits = _packed()[name].fitted().stream_bits
    else:
        bits = typical_bits(name, count)
    nbytes = round(count * bits / 8)
    return Weights(nbytes, nbytes, round(active * bits / 8), bits, bits)


def _by_tensor(
    parameters: Parameters,
    nbytes: Callable[[Tensor], int],
    stream_bits: float | None = None,
    packs: Callable[[Tensor], bool] = lambda tensor: tensor.is_linear,
) -> Weights:
    """Return sizes, given a function for the bytes of each tensor. stream_bits: by default computed."""
    total = parameters.total(nbytes)
    packed = parameters.total(lambda tensor: nbytes(tensor) if packs(tensor) else 0)
    if stream_bits is None:
        weights = parameters.total(lambda tensor: tensor.size if tensor.is_linear else 0)
        stream_bits = 8 * packed / weights if weights else 0.0
    read = parameters.read(nbytes)
    return Weights(total, packed, read, 8 * total / parameters.count, stream_bits)


@cache
def typical_bits(file_type: str, count: int) -> float:
    """Return the bits per weight of a file of Llama 3 8B, or of 70B from FEWEST_OF_LARGE parameters on. File
    types mix tensor types: Q4_K_M takes 4.8 to 4.9 bits, its base type 4.5."""
    table = Path(__file__).with_name("gguf_bits.json").read_text(encoding="utf-8")
    return json.loads(table)[file_type][count >= FEWEST_OF_LARGE]


def _of_file(file_type: str, parameters: Parameters) -> Weights:
    """Return the sizes of a model in a GGUF file of this type, tensors padded. Raises Unsupported for a
    family that llama.cpp or quantkit's exporter does not know."""
    file = gguf_tensors.of_model(parameters)
    if isinstance(file, Unsupported):
        raise file
    (family, named), settings = file, parameters.settings
    keys = ("expert_count", "expert_used_count") if family.mixture else ()
    experts, chosen = [settings.size(family.fields[key], most=MOST_EXPERTS) for key in keys] or (0, 0)
    model = Model(family.name, settings.layers, settings.heads, settings.kv_heads, experts)
    total, packed, weights, unread = 0, 0, 0, 0
    has_output = any(name == mixtures.OUTPUT for name, _ in named)
    for choice, (name, shape) in zip(mixtures.choose(file_type, model, named, True), named, strict=True):
        nbytes = mixtures.nbytes(choice.type, shape)
        padded = _padded(nbytes)
        if scale := mixtures.scale_of(name, choice.type, shape):
            nbytes, padded = nbytes + 4 * scale[1][0], padded + _padded(4 * scale[1][0])
        total += padded
        if name.startswith("blk.") and choice.type != "F32":
            packed, weights = packed + nbytes, weights + math.prod(shape)
        if name.startswith("position_embd") or (name == mixtures.EMBEDDING and has_output):
            unread += padded
        elif "_exps." in name:
            unread += padded * (experts - chosen) // experts
    bits_per_weight, stream_bits = 8 * total / parameters.count, 8 * packed / weights
    return Weights(total, packed, total - unread, bits_per_weight, stream_bits)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
