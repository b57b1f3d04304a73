"""Bytes of a model's weights in each format: packed linears with scales, other tensors unchanged.

Equal to the byte to what quantkit's methods write by default; GGUF without metadata and tokenizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any

from quantkit.capacity import Unsupported, gguf
from quantkit.capacity.parameters import Parameters, Tensor
from quantkit.capacity.settings import Settings
from quantkit.errors import count, name_all, one_of
from quantkit.layouts import Layout, LinearSpec
from quantkit.quantize import methods

SMALLER_GROUPS = (64, 32, 16)
BITS16 = "16 bit"
STORED = "stored"  # the files themselves, for models with headers
ALIASES = {
    "as stored": STORED, "fp16": "bf16", "bfloat16": "bf16", "float16": "bf16", "gguf": "q4_k_m",
}  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """A model in one format. bytes: size of all tensors; None if the format cannot store the model, with the
    `reason`.

    packed_bytes: size of the blocks' linears. read_bytes: bytes that a token reads, without lookup tables and
    other experts; None if their share is unknown. bits_per_weight: average over all parameters. stream_bits:
    bits per weight of the blocks' linears, with scales of groups and without a scale per row.
    """

    bytes: int | None
    packed_bytes: int
    read_bytes: int | None
    bits_per_weight: float | None
    stream_bits: float
    reason: str = ""


@dataclass(frozen=True)
class Packed:
    """Linears packed as by a method with these options, other tensors as stored. computes: the type in which
    engines multiply."""

    method: ModuleType
    options: Any
    computes: str

    @cached_property
    def layout(self) -> Layout:
        return self.method.layout(self.options)

    def nbytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of one packed linear."""
        return self.layout.nbytes(self._spec("", out_features, in_features))

    def tensor_bytes(self, tensor: Tensor) -> int:
        """Return the bytes of a packed linear, or of another tensor as stored."""
        return self.nbytes(tensor.out_features, tensor.in_features) if tensor.is_linear else tensor.nbytes

    @cached_property
    def stream_bits(self) -> float:
        """Return bits per weight with scales of groups, without scales of rows or columns."""
        low, high = 1 << 20, 1 << 21
        corners = self.nbytes(high, high) - self.nbytes(high, low) - self.nbytes(low, high)
        return 8 * (corners + self.nbytes(low, low)) / low**2

    def check(self, parameters: Parameters, model_type: str) -> None:
        """Raise Unsupported naming the linears of the blocks that cannot be packed."""
        if reason := self.layout.check_model(model_type):
            raise Unsupported(reason)
        if parameters.fused_experts or not parameters.linears:
            fused = "experts of a block are one tensor"
            raise Unsupported(fused if parameters.fused_experts else "no linears")
        refused: Counter[str] = Counter()
        for one, _, number in parameters.groups:
            if one.is_linear and (why := self._unfit(one)):
                refused[why] += number
        if refused:
            found = (f"{why} ({count(number, 'linear')})" for why, number in refused.most_common())
            raise Unsupported(name_all(found, 2))

    def _spec(self, name: str, out_features: int, in_features: int, conv1d: bool = False) -> LinearSpec:
        width = self.method.width(self.options, in_features)
        return LinearSpec(name, 0, name, out_features, in_features, width, conv1d=conv1d)

    def _unfit(self, tensor: Tensor) -> str | None:
        spec = self._spec(tensor.local, tensor.out_features, tensor.in_features, tensor.conv1d)
        size = spec.grid.group_size
        if spec.in_features % size:
            smaller = next((size for size in SMALLER_GROUPS if spec.in_features % size == 0), None)
            grouped = smaller and hasattr(self.method.Options, "group_size")
            fix = f"; --group-size {smaller} fits" if grouped else ""
            return f"in_features {spec.in_features} is no multiple of {size}{fix}"
        return self.layout.check(spec)


@cache
def _packed() -> dict[str, Packed]:
    found = {}
    for name in methods.available():
        if hasattr(module := methods.load(name), "layout"):
            found[name] = Packed(module, module.Options(), getattr(module, "COMPUTES", BITS16))
            for variant, (options, computes) in getattr(module, "VARIANTS", {}).items():
                found[variant] = Packed(module, module.Options(**options), computes)
    return found


def names() -> tuple[str, ...]:
    """Return the names of all formats."""
    return ("bf16", *_packed(), *gguf.FILE_TYPES)


def named(text: str) -> str:
    """Return the format of a user's name. Raises QuantkitError with similar names for an unknown one."""
    spelled = {name.lower(): name for name in (STORED, *names())}
    return spelled[one_of(text.lower(), spelled, f"unknown --method {text!r}", ALIASES)]


def of_method(method: str) -> str:
    """Return the format that a method writes with default options."""
    module = methods.load(method)
    return module.stored_as(module.Options()) if hasattr(module, "stored_as") else method


def computes(name: str) -> str:
    """Return the type in which engines multiply weights of this format, if the device has the type."""
    method = _packed().get(name)
    return method.computes if method else BITS16


def weights(name: str, parameters: Parameters, settings: Settings) -> Weights:
    """Return a model in the format of this name."""
    if name == "bf16":
        copy = parameters.head_copy
        return _by_tensor(parameters, settings, lambda tensor: 2 * tensor.size * (tensor is not copy), 16.0)
    if name == STORED:
        return _by_tensor(parameters, settings, lambda tensor: tensor.in_file)
    try:
        if method := _packed().get(name):
            method.check(parameters, settings.model_type)
            return _by_tensor(parameters, settings, method.tensor_bytes, method.stream_bits)
        total, packed, read, weights = gguf.file_bytes(name, parameters, settings)
        return Weights(total, packed, read, 8 * total / parameters.count, 8 * packed / weights)
    except Unsupported as error:
        return Weights(None, 0, None, None, 0.0, str(error))


def by_count(name: str, count: int, active: int) -> Weights:
    """Return `count` parameters in the format of this name, all of them packed.

    active: parameters that a token reads. GGUF file types have the bits of a Llama's file.
    """
    if name == "bf16":
        bits = 16.0
    elif name in _packed():
        bits = _packed()[name].stream_bits
    else:
        bits = gguf.typical_bits(name, count)
    nbytes = round(count * bits / 8)
    return Weights(nbytes, nbytes, round(active * bits / 8), bits, bits)


def _by_tensor(
    parameters: Parameters,
    settings: Settings,
    nbytes: Callable[[Tensor], int],
    stream_bits: float | None = None,
) -> Weights:
    """Return a format with `nbytes` for each tensor. stream_bits: by default those of the linears."""
    total = parameters.total(nbytes)
    packed = parameters.total(lambda tensor: nbytes(tensor) if tensor.is_linear else 0)
    if stream_bits is None:
        weights = parameters.total(lambda tensor: tensor.size if tensor.is_linear else 0)
        stream_bits = 8 * packed / weights if weights else 0.0
    read = parameters.read(settings, nbytes)
    return Weights(total, packed, read, 8 * total / parameters.count, stream_bits)
