"""What headers alone tell of quantized linears. No torch: a look at a checkpoint is to be quick.

Every layout has a `HEADERS` that says how its linears are found by the names of their tensors; what sizes
mean is said by its table (`Layout.tensors`). Others are understood as far as their sizes go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quantkit.errors import QuantkitError
from quantkit.layouts import Layout, Numbers, misfits

WORD = 32  # bits
Config = Mapping[str, Any]  # a `quantization_config`


class Header(Protocol):
    """Of one tensor, as a file's header has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


Parts = Mapping[str, Header]


class Stored(Protocol):
    """The checkpoint that a linear is stored in."""

    @property
    def quantization(self) -> Config:
        """Its `quantization_config`."""

    def small_tensor(self, name: str) -> bytes | None:
        """The bytes of a tensor of a few hundred bytes; None where they are out of reach."""


@dataclass(frozen=True)
class Codes:
    """How a weight is quantized. bits: of one code. group_size: columns that share a scale, None for a row
    or what headers do not tell. problem: sizes that do not fit one another. lacks: parts that are absent."""

    form: str
    bits: float
    group_size: int | None
    shape: tuple[int, int] | None
    weights: int
    problem: str = ""
    lacks: tuple[str, ...] = ()

    @property
    def numbers(self) -> Numbers:
        return int(self.bits), self.group_size

    def describe(self) -> str:
        """`4 bit, groups of 128`; the name alone where it says it all."""
        if self.form.isupper() or self.form in ("nf4", "fp4"):  # a ggml type, or bitsandbytes'
            return self.form
        integers = ("gptq", "awq", "mlx", "pack-quantized")
        form = f"{self.bits:g} bit" if self.form in integers else self.form
        return f"{form}, groups of {self.group_size}" if self.group_size else f"{form}, whole rows"


@dataclass(frozen=True)
class Mark:
    """A linear X is stored this way where there are `X<separator><marker>` and `codes`, the part that holds
    its codes. others: further parts. claims: whether a configuration means this one, of two with one marker.
    """

    marker: str
    codes: str
    others: tuple[str, ...]
    read: Callable[[Parts, Stored], Codes]
    separator: str = "."
    claims: Callable[[Config], bool] = lambda config: True


@dataclass(frozen=True)
class Headers:
    """A layout as headers show it.

    telling: endings of parts that mean nothing without the others. of_cache: endings of scales that belong to
    no linear, but to keys and values. counted: the form of codes whose bits and groups a configuration says.
    optional: parts that every linear has, or none. contradicted: what else a configuration and the codes
    `{linear: Codes}` do not agree on.
    """

    marks: tuple[Mark, ...]
    telling: tuple[str, ...] = ()
    of_cache: tuple[str, ...] = ()
    counted: str = ""
    optional: tuple[str, ...] = ()
    contradicted: Callable[[Config, Mapping[str, Codes]], Iterator[str]] = lambda config, coded: iter(())


def mark(
    layout: type[Layout], codes: str, read: Callable[[Parts, Stored], Codes], claims: Any = None
) -> Mark:
    """Return the mark of a layout's linears."""
    found = Mark(layout.marker, codes, layout.suffixes, read)
    return Mark(layout.marker, codes, layout.suffixes, read, claims=claims) if claims else found


def codes_of(form: str, layout: Layout | None, parts: Parts, told: int = 0) -> Codes:
    """Return what a layout's table makes of a linear's headers; with None, what its weight says alone.

    told: columns of a group, as the configuration calls them.
    """
    if layout is None:
        shape = parts["weight"].shape
        fits = tuple(shape) if len(shape) == 2 else None
        return Codes(form, 8, None, fits, math.prod(shape))
    try:
        spec = layout.sizes(parts)
        table, columns = layout.tensors(spec), spec.in_features
        size = group_size(columns, -(-columns // spec.grid.group_size), told)
    except KeyError as error:
        return Codes(form, 0, None, None, 0, f"its {error.args[0]} are absent")
    except (ArithmeticError, IndexError, ValueError, QuantkitError):
        sizes = ", ".join(f"{part} {list(info.shape)}" for part, info in parts.items())
        return Codes(form, 0, None, None, 0, f"sizes do not fit one another: {sizes}")
    why = ", ".join(sorted(misfits(parts, table).values()))
    lacks = tuple(part for part in table if part not in parts)
    shape = spec.out_features, columns
    return Codes(form, spec.grid.bits, size, shape, spec.weights, why, lacks)


def number(config: Config, key: str) -> int:
    """A positive integer of a configuration; 0 for anything else."""
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def group_size(in_features: int, groups: int, told: Any = None) -> int | None:
    """Columns of a group, as the configuration calls it where that fits; None for whole rows."""
    if isinstance(told, int) and 0 < told <= in_features and -(-in_features // told) == groups:
        return told
    return -(-in_features // groups) if groups > 1 else None


def words(count: int, bits: int) -> int:
    """Words of 32 bits that hold `count` codes."""
    return -(-count * bits // WORD)


def is_awq(config: Config) -> bool:
    """Whether a configuration means AWQ's order of codes; AutoRound says so in packing_format."""
    return "awq" in f"{config.get('quant_method')} {config.get('packing_format')}"
