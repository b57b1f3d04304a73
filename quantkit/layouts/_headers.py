"""What headers alone tell of quantized linears. No torch: a look at a checkpoint is to be quick.

Every layout has a `HEADERS` that says how its linears are found by the names of their tensors, and what their
sizes mean; also where quantkit has no decoder for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from quantkit.errors import name_all
from quantkit.layouts import LinearSpec, Table, Width

WORD = 32  # bits
Config = Mapping[str, Any]  # a `quantization_config`
Numbers = tuple[int, int | None]  # bits, and columns of a group: None for whole rows


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
    or what headers do not tell. problem: sizes that do not fit one another."""

    form: str
    bits: float
    group_size: int | None
    shape: tuple[int, int] | None
    weights: int
    problem: str = ""

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

    shared: form -> parts that every linear of it has, or none. needed: form -> parts that it cannot do
    without, by its other parts. telling: endings of parts that mean nothing without the others. of_cache:
    endings of scales that belong to no linear, but to keys and values. promised:
    what a configuration says of a linear, one of several numbers; None for one that is not understood.
    contradicted: what a configuration and the codes `{linear: (header's dtype, Codes)}` do not agree on.
    """

    marks: tuple[Mark, ...]
    shared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needed: Mapping[str, Callable[[Parts], tuple[str, ...]]] = field(default_factory=dict)
    telling: tuple[str, ...] = ()
    of_cache: tuple[str, ...] = ()
    promised: Callable[[Config], Callable[[str], list[Numbers]] | None] = lambda config: None
    contradicted: Callable[[Config, Mapping[str, tuple[str, Codes]]], Iterator[str]] = lambda config, coded: (
        iter(())
    )


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


# ---- what gptq and awq have in common


def is_awq(config: Config) -> bool:
    """Whether a configuration means AWQ's order of codes; AutoRound says so in packing_format."""
    return "awq" in f"{config.get('quant_method')} {config.get('packing_format')}"


def in_words(
    form: str,
    parts: Parts,
    config: Config,
    sizes: Callable[[Parts, int], tuple[float, int]],
    tensors: Callable[[LinearSpec], Table],
) -> Codes:
    """Codes of `qweight`, a matrix of words. sizes(parts, out_features): bits of a code, and in_features;
    tensors: the layout's.

    Forms that are not understood but have the same names (of AWQ's gemv, Marlin, BitBLAS) are not judged.
    """
    qweight, scales = parts["qweight"].shape, parts.get("scales")
    if scales is None or len(scales.shape) != 2 or len(qweight) != 2 or not all((*scales.shape, *qweight)):
        return Codes(form, number(config, "bits"), None, None, 0, "its scales are absent or no matrix")
    groups, out_features = scales.shape
    bits, in_features = sizes(parts, out_features)
    size = group_size(in_features, groups, config.get("group_size"))
    if bits in range(2, 9) and in_features:
        grid = Width(int(bits), size or in_features)
        table = tensors(LinearSpec("", None, "", out_features, in_features, grid))
        problems = [p for p, (_, shape) in table.items() if p in parts and tuple(parts[p].shape) != shape]
    else:
        problems = [f"qweight ({bits:g} bit)"]
    gptq = config.get("checkpoint_format") or config.get("format")
    version = config.get("version") if form == "awq" else gptq
    if str(version or form).lower() not in ("gemm", "awq", "gptq", "gptq_v2", "gptq_p"):
        problems = []
    told = ", ".join(f"{part} {list(info.shape)}" for part, info in parts.items())
    why = f"{' and '.join(problems)} do not fit: {told}" if problems else ""
    return Codes(form, bits, size, (out_features, in_features), out_features * in_features, why)


def grouped(config: Config) -> Numbers | None:
    """Bits and group size of all linears, where a configuration says them."""
    bits, size = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    if type(bits) is not int or type(size) is not int or size == 0:
        return None
    return bits, size if size > 0 else None


def of_words(form: str) -> Callable[[Config, Mapping[str, tuple[str, Codes]]], Iterator[str]]:
    """`Headers.contradicted` of linears whose codes are 32-bit words."""

    def contradicted(config: Config, coded: Mapping[str, tuple[str, Codes]]) -> Iterator[str]:
        own = {linear: dtype for linear, (dtype, codes) in coded.items() if codes.form == form}
        if own and config.get("group_size", -1) in (0, None, ""):
            yield f"quantization_config says groups of {config['group_size']!r}"
        wide = [linear for linear, dtype in own.items() if dtype not in ("I32", "U32")]
        if wide and config.get("pack_dtype", "int32") == "int32":
            yield f"the codes of {name_all(wide, 3)} are no 32-bit words"

    return contradicted
